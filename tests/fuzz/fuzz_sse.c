/* Fuzzer of the SSE framer (csrc/stream/sse.c): any bytes, split into any reads.
 *
 * With clang:  clang -g -O1 -fsanitize=fuzzer,address,undefined -DLIBFUZZER -Icsrc tests/fuzz/fuzz_sse.c csrc/stream/sse.c
 * With gcc:    gcc -g -O2 -fsanitize=address,undefined -Icsrc tests/fuzz/fuzz_sse.c csrc/stream/sse.c -o fuzz
 *              ./fuzz EXECUTIONS [SEED]      (a generator of the format's elements)
 *
 * Checks: every byte is passed on once and in order; the events do not depend on how the reads are split; data is inside its frame; no
 * frame exceeds the limit; only the limit stops the framer; newline-delimited JSON has one event per line that is not blank.
 */
#include "fuzz_main.h"
#include "stream/sse.h"

enum { MOST = 4096 };

struct result {
    size_t bytes, events;
    uint64_t digest; /* of the events' kinds and data, without frame boundaries */
    const uint8_t *input;
    size_t limit;
    bool lines;
};

static uint64_t mix(uint64_t digest, const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        digest = (digest ^ bytes[i]) * 1099511628211u;
    return digest;
}

static int on_frame(void *context, const uint8_t *frame, size_t size, const struct sse_frame *info)
{
    struct result *s = context;
    demand(memcmp(frame, s->input + s->bytes, size) == 0, "the bytes are passed on unchanged");
    demand((size_t)info->data_start + info->data_size <= size, "data is inside its frame");
    demand(size <= s->limit || info->kind == SSE_TAIL || info->kind == SSE_SILENT, "a frame does not exceed the limit");
    demand(info->kind != SSE_DATA || info->data_lines > 0, "an event has data");
    s->bytes += size;
    if (info->kind == SSE_DATA || info->kind == SSE_DONE) {
        uint8_t head[4] = {info->kind, (uint8_t)info->data_lines, info->flags, 0};
        s->digest = mix(mix(s->digest, head, sizeof head), frame + info->data_start, info->data_size);
        s->events++;
    }
    return SSE_OK;
}

/* Feed `input` in reads whose sizes come from `cuts`; cut_size 0: in one read. */
static int run(const uint8_t *input, size_t size, const uint8_t *cuts, size_t cut_size, size_t limit, bool lines, struct result *s)
{
    struct sse framer;
    sse_init(&framer, limit);
    framer.lines = lines;
    *s = (struct result){.input = input, .limit = limit, .lines = lines};
    int status = SSE_OK;
    for (size_t at = 0, i = 0; at < size && status == SSE_OK; i++) {
        size_t step = cut_size ? 1u + cuts[i % cut_size] % 64 : size;
        if (step > size - at)
            step = size - at;
        status = sse_feed(&framer, input + at, step, on_frame, s);
        at += step;
    }
    if (status == SSE_OK) {
        status = sse_finish(&framer, on_frame, s);
        demand(s->bytes == size, "every byte is passed on");
    }
    sse_free(&framer);
    return status;
}

/* Return the number of lines that end in LF and are not blank, counted byte by byte. */
static size_t count_lines(const uint8_t *bytes, size_t size)
{
    size_t lines = 0;
    bool blank = true;
    for (size_t i = size >= 3 && memcmp(bytes, "\xef\xbb\xbf", 3) == 0 ? 3 : 0; i < size; i++) {
        if (bytes[i] == '\n') {
            lines += !blank;
            blank = true;
        } else if (bytes[i] != '\r' && bytes[i] != ' ' && bytes[i] != '\t') {
            blank = false;
        }
    }
    return lines;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 4 || size > MOST)
        return 0;
    size_t cut_size = data[0] % 8;
    bool lines = data[0] >= 128;
    if (size < 2 + cut_size)
        return 0;
    size_t limit = data[1] < 200 ? MOST * 2 : 16 + data[1] % 32;
    const uint8_t *input = data + 2 + cut_size;
    size_t input_size = size - 2 - cut_size;
    struct result whole, cut;
    int a = run(input, input_size, NULL, 0, limit, lines, &whole);
    int b = run(input, input_size, data + 2, cut_size, limit, lines, &cut);
    if (limit > MOST)
        demand(a == SSE_OK && b == SSE_OK, "with a large limit nothing is refused");
    if (a == SSE_OK && b == SSE_OK)
        demand(whole.events == cut.events && whole.digest == cut.digest, "the split of reads does not change the events");
    if (a == SSE_OK && lines)
        demand(whole.events == count_lines(input, input_size), "each line that is not blank is one event");
    return 0;
}

#ifndef LIBFUZZER
enum { MOST_PIECES = 256 }; /* bytes of a generated input */

static size_t generate(uint8_t *input)
{
    static const char *const pieces[] = {"data",
                                         "data:",
                                         "data: ",
                                         "event",
                                         "event: error",
                                         "id: 1",
                                         ":",
                                         ": ping",
                                         " ",
                                         "\n",
                                         "\r",
                                         "\r\n",
                                         "\n\n",
                                         "\r\n\r\n",
                                         "\r\r",
                                         "[DONE]",
                                         "\xef\xbb\xbf",
                                         "{\"a\":1}",
                                         "retry: 5",
                                         "x",
                                         "\xc3\xa9",
                                         "\xf0\x9f\xa6\x8a",
                                         "data: [DONE]\n\n",
                                         "{\"done\":true}\n",
                                         "\t"};
    enum { PIECES = sizeof pieces / sizeof *pieces };
    size_t size = 0;
    for (size_t head = 2 + next() % 8; size < head; size++)
        input[size] = (uint8_t)next();
    for (unsigned parts = next() % 20; parts; parts--) {
        const char *piece = pieces[next() % PIECES];
        size_t length = strlen(piece);
        if (size + length + 1 > MOST_PIECES)
            break;
        memcpy(input + size, piece, length);
        size += length;
        if (next() % 16 == 0)
            input[size++] = (uint8_t)next();
    }
    return size;
}

int main(int argc, char **argv)
{
    return fuzz_main(argc, argv, generate);
}
#endif
