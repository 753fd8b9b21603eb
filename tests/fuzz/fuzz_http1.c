/* Fuzzer of the HTTP/1.1 reader (csrc/stream/http1.c): any bytes, split into any reads, with or without an end.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -DLIBFUZZER -Icsrc tests/fuzz/fuzz_http1.c csrc/stream/http1.c -o fuzz
 *   ./fuzz tests/fuzz/corpus/http1
 *   gcc -g -O2 -fsanitize=address,undefined -Icsrc tests/fuzz/fuzz_http1.c csrc/stream/http1.c -o fuzz && ./fuzz EXECUTIONS [SEED]
 *
 * Checks: the status, the body and the lines do not depend on how the reads are split; no more bytes are used than were passed; a body
 * with a length is exactly that long; an answer whose connection is reused ended by its own framing.
 */
#include "fuzz_main.h"
#include "stream/http1.h"

enum { MOST = 1 << 15 };

struct result {
    size_t body, lines, used;
    uint64_t digest;
    int status, code;
    bool keep;
};

static void mix(struct result *s, const void *bytes, size_t size, int what)
{
    const uint8_t *at = bytes;
    for (size_t i = 0; i < size; i++)
        s->digest = (s->digest ^ at[i]) * 1099511628211u + (uint64_t)what;
}

static bool on_line(void *context, const char *line, size_t size)
{
    struct result *s = context;
    demand(size > 0 && line[size - 1] == '\n', "a line is passed on with its end");
    s->lines += size;
    mix(s, line, size, 1);
    return true;
}

static bool on_body(void *context, const uint8_t *bytes, size_t size)
{
    struct result *s = context;
    demand(size > 0, "a part of a body has bytes");
    s->body += size;
    mix(s, bytes, size, 2);
    return true;
}

/* Feed `input` in reads whose sizes come from `cuts` (cut_size 0: in one read), each from memory of exactly its size. */
static struct result run(const uint8_t *input, size_t size, const uint8_t *cuts, size_t cut_size, bool no_body)
{
    struct result s = {.status = HTTP1_MORE};
    struct http1_sink sink = {on_line, on_body, &s};
    struct http1 reader;
    http1_init(&reader, no_body);
    for (size_t at = 0, i = 0; at < size && s.status == HTTP1_MORE; i++) {
        size_t step = cut_size ? 1u + cuts[i % cut_size] % 64 : size, used = 0;
        if (step > size - at)
            step = size - at;
        uint8_t *read = malloc(step);
        if (!read)
            abort();
        memcpy(read, input + at, step);
        s.status = http1_feed(&reader, read, step, &used, &sink);
        free(read);
        demand(used <= step, "no more bytes are used than were passed");
        demand(s.status != HTTP1_MORE || used == step, "a reader that continues has read everything");
        at += step;
        s.used += used;
    }
    if (s.status == HTTP1_MORE)
        s.status = http1_end(&reader);
    s.code = reader.status;
    s.keep = reader.keep;
    if (s.status == HTTP1_DONE) {
        bool bodiless = no_body || s.code == 204 || s.code == 304;
        demand(s.code >= 200, "an interim answer is not the final answer");
        demand(!bodiless || s.body == 0, "an answer without a body has none");
        if (!bodiless && reader.has_length)
            demand(s.body == reader.length, "a body is as long as its Content-Length");
        demand(!s.keep || bodiless || reader.has_length || reader.chunked, "the answer on a reusable connection ended by its own framing");
    }
    demand(s.body + s.lines <= s.used, "no more bytes are passed on than were read");
    demand(s.status == HTTP1_MORE || s.status == HTTP1_DONE || *http1_explain(s.status), "each error has a description");
    http1_free(&reader);
    return s;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 || size > MOST)
        return 0;
    size_t cut_size = 1 + data[0] % 7;
    if (size < 1 + cut_size)
        return 0;
    const uint8_t *input = data + 1 + cut_size;
    size -= 1 + cut_size;
    bool no_body = data[0] >= 240;
    struct result whole = run(input, size, NULL, 0, no_body), cut = run(input, size, data + 1, cut_size, no_body);
    demand(whole.status == cut.status && whole.code == cut.code && whole.keep == cut.keep, "the split of reads does not change the status");
    demand(whole.body == cut.body && whole.lines == cut.lines && whole.digest == cut.digest, "the split of reads does not change the data");
    return 0;
}

#ifndef LIBFUZZER
enum { MOST_PIECES = 512 }; /* bytes of a generated input */

static const char *const HEADS[] = {"HTTP/1.1 200 OK\r\n", "HTTP/1.0 200\r\n", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 204 \n",
                                    "HTTP/1.1 500 x\r\n", "HTTP/1.1 101 S\r\n\r\n", "HTTP/2 200\r\n", "H"};
static const char *const FIELDS[] = {"Content-Length: 5\r\n", "content-length: 5, 5\r\n", "Content-Length: 6\r\n",
                                     "Content-Length: 99999999999999999999\r\n", "Content-Length: -1\r\n",
                                     "Transfer-Encoding: chunked\r\n", "Transfer-Encoding: gzip, chunked\r\n",
                                     "Connection: close\r\n", "Connection: keep-alive, x\n", "Content-Type: text/event-stream\r\n",
                                     "A : b\r\n", " folded\r\n", "X:\r\n", ":\r\n", "Set-Cookie: a=b\r\n"};
static const char *const BODIES[] = {"hello", "5\r\nhello\r\n", "0\r\n\r\n", "00\r\nT: x\r\n\r\n", "5;a=b\r\nhello\r\n", "a \r\n0123456789\r\n",
                                     "5\nhello\n", "fffffffffffffffff\r\n", "0\r\n", "\r\n", "zz\r\n", "1\r\nx\r\n", "\r", "\n", "x"};

static size_t add(uint8_t *input, size_t size, size_t most, const char *piece)
{
    size_t length = strlen(piece);
    if (size + length + 1 > most)
        return size;
    memcpy(input + size, piece, length);
    size += length;
    if (next() % 64 == 0)
        input[size++] = (uint8_t)next();
    return size;
}

static size_t generate(uint8_t *input)
{
    size_t size = 0;
    for (size_t head = 2 + next() % 7; size < head; size++)
        input[size] = (uint8_t)next();
    for (unsigned heads = 1 + next() % 2; heads; heads--)
        size = add(input, size, MOST_PIECES, next() % 4 ? HEADS[0] : PICK(HEADS));
    for (unsigned fields = next() % 4; fields; fields--)
        size = add(input, size, MOST_PIECES, PICK(FIELDS));
    size = add(input, size, MOST_PIECES, "\r\n");
    for (unsigned bodies = next() % 6; bodies; bodies--)
        size = add(input, size, MOST_PIECES, PICK(BODIES));
    return size;
}

int main(int argc, char **argv)
{
    return fuzz_main(argc, argv, generate);
}
#endif
