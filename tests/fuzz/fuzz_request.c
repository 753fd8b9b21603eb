/* Fuzzer of the check of requests (csrc/stream/request.c): any bytes as method, URL, field names and values, and body.
 *
 *   clang -g -O1 -fsanitize=fuzzer,address,undefined -DLIBFUZZER -Icsrc tests/fuzz/fuzz_request.c csrc/stream/request.c -o fuzz
 *   ./fuzz tests/fuzz/corpus/request
 *   gcc -g -O2 -fsanitize=address,undefined -Icsrc tests/fuzz/fuzz_request.c csrc/stream/request.c -o fuzz && ./fuzz EXECUTIONS [SEED]
 *
 * Checks what libcurl is passed: method and names are tokens, nothing has a control byte, so that nothing in it can end a line and begin a
 * second request; no length of the caller, no field of one connection, each name once; each field of the caller with its value. A request
 * without anything unusual is accepted.
 */
#include "fuzz_main.h"
#include "stream/request.h"

#include <strings.h>

enum { MOST = 1 << 14, MOST_FIELDS = 6 };

static unsigned long long accepted, refused;

/* ---- what is passed to libcurl */

static bool token_byte(uint8_t c)
{
    static const char symbols[] = "!#$%&'*+-.^_`|~";
    return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || (c && memchr(symbols, c, sizeof symbols - 1));
}

static size_t token_size(const uint8_t *at, size_t size)
{
    size_t n = 0;
    while (n < size && token_byte(at[n]))
        n++;
    return n;
}

static struct text without_blanks(struct text t)
{
    while (t.size && strchr(" \t", t.at[0]))
        t = (struct text){t.at + 1, t.size - 1};
    while (t.size && strchr(" \t", t.at[t.size - 1]))
        t.size--;
    return t;
}

static bool has_field(const struct request *r, const struct field *f)
{
    const char *name, *value;
    struct text expected = without_blanks(f->value);
    for (size_t at = 0; request_next_field(r, &at, &name, &value);)
        if (strcmp(name, f->name.at) == 0 && strlen(value) == expected.size && memcmp(value, expected.at, expected.size) == 0)
            return true;
    return false;
}

static void check_fields(const struct request *r, const struct request_spec *q)
{
    static const char *const forbidden[] = {"content-length", "transfer-encoding", "connection", "upgrade",         "te",
                                            "trailer",        "keep-alive",        "expect",     "proxy-connection"};
    const char *name, *value, *other, *unused;
    for (size_t i = 0; i < q->field_count; i++)
        demand(strcasecmp(q->fields[i].name.at, "content-length") == 0 || has_field(r, &q->fields[i]), "every field of the caller is sent");
    for (size_t at = 0; request_next_field(r, &at, &name, &value);) {
        size_t size = strlen(name);
        demand(size && token_size((const uint8_t *)name, size) == size, "a field's name is a token");
        for (const char *c = value; *c; c++)
            demand((uint8_t)*c >= ' ' || *c == '\t', "a field's value has no control byte");
        demand(!strchr(value, '\x7f'), "a field's value has no DEL");
        for (size_t i = 0; i < sizeof forbidden / sizeof *forbidden; i++)
            demand(strcasecmp(name, forbidden[i]), "no length of the caller, and no field of one connection");
        for (size_t next = at; request_next_field(r, &next, &other, &unused);)
            demand(strcasecmp(name, other), "each name is given once");
    }
    demand(token_size((const uint8_t *)r->method, strlen(r->method)) == strlen(r->method), "libcurl's method is a token");
    for (const char *c = r->url; *c; c++)
        demand((uint8_t)*c >= ' ' && *c != 0x7f, "libcurl's URL has no control byte");
}

/* ---- one execution */

static bool is_usual_field(const struct field *f)
{
    size_t size = f->name.size;
    bool usual = size > 0 && size < 4 && f->value.size < 99;
    for (size_t i = 0; usual && i < size; i++)
        usual = strchr("XYZCT", f->name.at[i]) && f->name.at[i];
    for (size_t i = 0; usual && i < f->value.size; i++)
        usual = f->value.at[i] >= 'a' && f->value.at[i] <= 'z';
    return usual;
}

/* A POST of http://h/a with short names of fields, also such as begin a name with a meaning: Content-Length, Transfer-Encoding. */
static bool is_usual(const struct request_spec *q)
{
    bool usual = strcmp(q->method.at, "POST") == 0 && strcmp(q->url.at, "http://h/a") == 0 && q->method.size == 4 && q->url.size == 10;
    for (size_t i = 0; usual && i < q->field_count; i++) {
        usual = is_usual_field(&q->fields[i]);
        for (size_t k = 0; usual && k < i; k++)
            usual = strcmp(q->fields[k].name.at, q->fields[i].name.at) != 0;
    }
    return usual;
}

static void run(const struct request_spec *q)
{
    struct request r;
    size_t at;
    int status = request_normalise(q, &r, &at);
    demand(status == REQUEST_OK || *request_explain(status), "each status has a description");
    demand(status == REQUEST_OK || !is_usual(q), "a usual request is accepted");
    if (status != REQUEST_OK) {
        demand(at <= q->field_count, "the refused field is one of the request's");
        refused++;
    } else {
        check_fields(&r, q);
        demand(r.body_size == (q->body ? q->body_size : 0), "the body is the caller's");
        accepted++;
    }
    request_free(&r);
}

static struct text take(const uint8_t **data, size_t *size, char **own)
{
    size_t length = *size ? **data : 0;
    *data += *size != 0;
    *size -= *size != 0;
    length = length > *size ? *size : length;
    *own = malloc(length + 1);
    if (!*own)
        abort();
    memcpy(*own, *data, length);
    (*own)[length] = 0;
    *data += length;
    *size -= length;
    return (struct text){*own, length};
}

/* The first byte: number of fields, whether there is a body, whether the URL begins with http://h/ . Then texts with their sizes. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct field fields[MOST_FIELDS];
    char *own[2 * MOST_FIELDS + 3];
    size_t owned = 0;
    if (size < 1 || size > MOST)
        return 0;
    uint8_t how = *data++;
    size--;
    struct request_spec q = {.fields = fields, .field_count = how % (MOST_FIELDS + 1), .user_agent = how & 64 ? "fuzz/1" : NULL};
    q.method = take(&data, &size, &own[owned++]);
    q.url = take(&data, &size, &own[owned++]);
    for (size_t i = 0; i < q.field_count; i++) {
        fields[i].name = take(&data, &size, &own[owned++]);
        fields[i].value = take(&data, &size, &own[owned++]);
    }
    if (how & 128) {
        struct text body = take(&data, &size, &own[owned++]);
        q.body = body.at;
        q.body_size = body.size;
    }
    run(&q);
    while (owned)
        free(own[--owned]);
    return 0;
}

#ifndef LIBFUZZER
static const char *const METHODS[] = {"POST", "GET", "HEAD", "PUT", "M-SEARCH", "GET / HTTP/1.1\r\nHost: a\r\n\r\nGET", "G T", "", "CONNECT", "get\t"};
static const char *const URLS[] = {"http://h/a", "http://h:80", "http://127.0.0.1:8000/v1?q=a b", "http://[::1]:9/x#f", "HTTP://H/%0d%0a",
                                   "https://h/a", "http://u:p@h/", "http://h/../\\..//?\r\nX: y", "http://h /", "http://[fe80::1%25e]/",
                                   "http://h/\xc3\xa9?\xff", "http://h\xc3\xa9/", "http:///", "ftp://h/", "http://h:99999/", "http://h/a?b\xe2\x80\xa8"};
static const char *const NAMES[] = {"X-A", "X-B", "X-C", "x-a", "Content-Length", "content-length", "Transfer-Encoding", "Host", "hOST", "C",
                                    "Content-Type", "Connection", "Content-Length ", "X: y\r\nZ", "\nHost", "", "User-Agent", "Accept", "TE", "T"};
static const char *const VALUES[] = {"a", "", "5", "0", " 5 ", "chunked", "a\r\nB: c", "a\r\n\r\nGET / HTTP/1.1\r\nHost: b\r\n\r\n", "\r", "\n",
                                     "close", "h.example:80", "a\tb", "\x7f", "\xc3\xa9", "a/b", "x, y", "+5", "05"};

static size_t add(uint8_t *input, size_t size, const char *text)
{
    size_t length = strlen(text);
    uint8_t *at = input + size;
    *at = (uint8_t)length;
    memcpy(at + 1, text, length);
    if (length && next() % 32 == 0)
        at[1 + next() % length] = (uint8_t)next();
    if (next() % 256 == 0)
        *at = (uint8_t)next();
    return size + length + 1;
}

static size_t generate(uint8_t *input)
{
    size_t size = 1;
    input[0] = (uint8_t)next();
    size = add(input, size, next() % 4 ? METHODS[next() % 4 ? 0 : 1] : PICK(METHODS));
    size = add(input, size, next() % 4 ? URLS[0] : PICK(URLS));
    for (unsigned field = 0; field < (unsigned)input[0] % (MOST_FIELDS + 1); field++) {
        char name[] = {"XYZCT"[next() % 5], "XYZCT"[next() % 5], next() % 4 ? "XYZCT"[next() % 5] : 0, 0};
        name[next() % 4 ? 2 : 1] = 0;
        size = add(input, size, next() % 8 ? name : PICK(NAMES));
        size = add(input, size, next() % 4 ? VALUES[0] : PICK(VALUES));
    }
    if (input[0] & 128)
        size = add(input, size, PICK(VALUES));
    return size;
}

int main(int argc, char **argv)
{
    int status = fuzz_main(argc, argv, generate);
    printf("%llu accepted, %llu refused\n", accepted, refused);
    return status;
}
#endif
