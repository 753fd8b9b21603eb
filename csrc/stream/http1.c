/* The reader of http1.h: one state per position at which a read may end. */
#include "http1.h"
#include "text.h"

enum state { HEAD, LENGTH, TO_END, CHUNK_SIZE, CHUNK_EXTENSION, CHUNK_SIZE_LF, CHUNK, CHUNK_CR, CHUNK_LF, TRAILER, DONE };

void http1_init(struct http1 *h, bool no_body)
{
    memset(h, 0, sizeof *h);
    h->no_body = no_body;
}

void http1_free(struct http1 *h)
{
    vector_free(&h->pending);
}

const char *http1_explain(int status)
{
    switch (status) {
    case HTTP1_NOT_HTTP:
        return "the answer is not HTTP/1.0 or HTTP/1.1";
    case HTTP1_BAD_FIELD:
        return "the answer has a malformed header field";
    case HTTP1_BAD_LENGTH:
        return "the answer's Content-Length is malformed or contradicts itself";
    case HTTP1_BAD_CODING:
        return "the answer's Transfer-Encoding is not plainly chunked";
    case HTTP1_BAD_CHUNK:
        return "the answer's chunked framing is malformed";
    case HTTP1_SWITCHED:
        return "the server switched to a protocol that was not requested";
    case HTTP1_TOO_LARGE:
        return "the answer's head or trailers are too large";
    case HTTP1_TRUNCATED:
        return "the connection ended inside the answer";
    case HTTP1_NO_ANSWER:
        return "the connection ended before the answer began";
    default:
        return "";
    }
}

/* ---- lines */

/* The next line with its LF, or NULL if it does not end in this read. It is in the read or in `pending`. */
static int take_line(struct http1 *h, const uint8_t *bytes, size_t size, size_t *used, const uint8_t **line, size_t *length)
{
    const uint8_t *lf = memchr(bytes, '\n', size);
    size_t piece = lf ? (size_t)(lf - bytes) + 1 : size;
    *line = NULL;
    *used = piece;
    if (piece > HTTP1_MAX_LINE - h->pending.size || piece > HTTP1_MAX_HEAD - h->head_size)
        return HTTP1_TOO_LARGE;
    h->head_size += piece;
    if (lf && h->pending.size == 0) {
        *line = bytes;
        *length = piece;
        return HTTP1_MORE;
    }
    if (vector_add(&h->pending, bytes, piece))
        return HTTP1_NO_MEMORY;
    if (lf) {
        *line = h->pending.base;
        *length = h->pending.size;
        h->pending.size = 0; /* its bytes are valid until the next line is stored */
    }
    return HTTP1_MORE;
}

static size_t without_end(const uint8_t *line, size_t size)
{
    size--; /* LF */
    return size && line[size - 1] == '\r' ? size - 1 : size;
}

static bool is_digit(uint8_t c)
{
    return c >= '0' && c <= '9';
}

static bool is_blank(uint8_t c)
{
    return c == ' ' || c == '\t';
}

/* ---- fields */

/* The next element of a comma-separated list; false at its end. */
static bool next_element(struct text *list, struct text *element)
{
    if (!list->at)
        return false;
    const char *comma = memchr(list->at, ',', list->size);
    size_t size = comma ? (size_t)(comma - list->at) : list->size;
    *element = text_trimmed((struct text){list->at, size});
    list->size -= comma ? size + 1 : size;
    list->at = comma ? comma + 1 : NULL;
    return true;
}

/* A length may be repeated, as fields or in a list, if the values are equal. */
static int read_length(struct http1 *h, struct text value)
{
    struct text element;
    while (next_element(&value, &element)) {
        uint64_t length = 0;
        if (element.size == 0 || element.size > 18)
            return HTTP1_BAD_LENGTH;
        for (size_t i = 0; i < element.size; i++) {
            if (element.at[i] < '0' || element.at[i] > '9')
                return HTTP1_BAD_LENGTH;
            length = length * 10 + (uint64_t)(element.at[i] - '0');
        }
        if (h->has_length && h->length != length)
            return HTTP1_BAD_LENGTH;
        h->has_length = true;
        h->length = length;
    }
    return HTTP1_MORE;
}

static void read_connection(struct http1 *h, struct text value)
{
    struct text element;
    while (next_element(&value, &element)) {
        h->close |= text_is(element, "close");
        h->keep_alive |= text_is(element, "keep-alive");
    }
}

static int read_known(struct http1 *h, struct text name, struct text value)
{
    if (text_is(name, "content-length"))
        return read_length(h, value);
    if (text_is(name, "transfer-encoding")) {
        if (h->chunked || !text_is(value, "chunked"))
            return HTTP1_BAD_CODING;
        h->chunked = true;
    } else if (text_is(name, "connection")) {
        read_connection(h, value);
    } else if (text_is(name, "content-type")) {
        size_t size = value.size < HTTP1_TYPE_SIZE - 1 ? value.size : HTTP1_TYPE_SIZE - 1;
        memcpy(h->type, value.at, size);
        h->type[size] = 0;
    }
    return HTTP1_MORE;
}

static int read_field(struct http1 *h, const uint8_t *line, size_t size)
{
    size_t name = 0;
    while (name < size && text_is_tchar((char)line[name]))
        name++;
    if (name == 0 || name == size || line[name] != ':')
        return HTTP1_BAD_FIELD;
    for (size_t i = name + 1; i < size; i++)
        if ((line[i] < ' ' && line[i] != '\t') || line[i] == 0x7f)
            return HTTP1_BAD_FIELD;
    if (h->state == TRAILER) /* a trailer cannot change the framing */
        return HTTP1_MORE;
    const char *text = (const char *)line;
    return read_known(h, (struct text){text, name}, text_trimmed((struct text){text + name + 1, size - name - 1}));
}

/* ---- the head */

/* Whether the received bytes can be the beginning of a status line: other data is refused without waiting for a line end. */
static bool may_be_status_line(const uint8_t *line, size_t size)
{
    return memcmp(line, "HTTP/1.", size < 7 ? size : 7) == 0;
}

static int read_status_line(struct http1 *h, const uint8_t *line, size_t size)
{
    bool fits = size >= 12 && may_be_status_line(line, size) && (line[7] == '0' || line[7] == '1') && line[8] == ' ' && line[9] >= '1' &&
                is_digit(line[9]) && is_digit(line[10]) && is_digit(line[11]) && (size == 12 || line[12] == ' ');
    if (!fits)
        return HTTP1_NOT_HTTP;
    h->minor = (uint8_t)(line[7] - '0');
    h->status = (uint16_t)((line[9] - '0') * 100 + (line[10] - '0') * 10 + (line[11] - '0'));
    return HTTP1_MORE;
}

static int finish(struct http1 *h)
{
    h->state = DONE;
    return HTTP1_DONE;
}

/* RFC 9112 6.3: length of the body. */
static int end_head(struct http1 *h)
{
    h->head_size = 0;
    if (h->status == 101)
        return HTTP1_SWITCHED;
    if (h->status < 200) {
        if (++h->interim > HTTP1_MAX_INTERIM)
            return HTTP1_TOO_LARGE;
        h->status = 0;
        h->has_length = h->chunked = h->close = h->keep_alive = false;
        h->type[0] = 0;
        return HTTP1_MORE;
    }
    if (h->chunked && h->minor == 0)
        return HTTP1_BAD_CODING;
    if (h->chunked && h->has_length)
        return HTTP1_BAD_LENGTH;
    h->keep = !h->close && (h->minor == 1 || h->keep_alive);
    if (h->no_body || h->status == 204 || h->status == 304)
        return finish(h);
    if (h->chunked) {
        h->state = CHUNK_SIZE;
    } else if (h->has_length) {
        h->left = h->length;
        h->state = LENGTH;
        if (h->left == 0)
            return finish(h);
    } else {
        h->keep = false;
        h->state = TO_END;
    }
    return HTTP1_MORE;
}

static int feed_head(struct http1 *h, const uint8_t *bytes, size_t size, size_t *used, const struct http1_sink *sink)
{
    const uint8_t *line;
    size_t length = 0;
    int status = take_line(h, bytes, size, used, &line, &length);
    if (status != HTTP1_MORE)
        return status;
    bool first = h->state == HEAD && h->status == 0;
    if (!line)
        return first && !may_be_status_line(h->pending.base, h->pending.size) ? HTTP1_NOT_HTTP : HTTP1_MORE;
    size_t plain = without_end(line, length);
    if (first)
        status = read_status_line(h, line, plain);
    else if (plain)
        status = read_field(h, line, plain);
    if (status != HTTP1_MORE)
        return status;
    if (!sink->line(sink->context, (const char *)line, length))
        return HTTP1_REFUSED;
    if (first || plain)
        return HTTP1_MORE;
    return h->state == TRAILER ? finish(h) : end_head(h);
}

/* ---- the body */

static int hex_value(uint8_t c)
{
    if (is_digit(c))
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* One byte of a chunk's framing. */
static int feed_framing(struct http1 *h, uint8_t c)
{
    switch (h->state) {
    case CHUNK_SIZE: {
        int digit = hex_value(c);
        if (digit >= 0 && ++h->digits <= 15) { /* 15 digits cannot overflow */
            h->left = h->left * 16 + (uint64_t)digit;
            return HTTP1_MORE;
        }
        if (digit >= 0 || h->digits == 0)
            return HTTP1_BAD_CHUNK;
        if (c != '\r' && c != ';' && !is_blank(c))
            return HTTP1_BAD_CHUNK;
        h->state = c == '\r' ? CHUNK_SIZE_LF : CHUNK_EXTENSION;
        return HTTP1_MORE;
    }
    case CHUNK_EXTENSION:
        if (c == '\n' || ++h->head_size > HTTP1_MAX_CHUNK_LINE)
            return HTTP1_BAD_CHUNK;
        if (c == '\r')
            h->state = CHUNK_SIZE_LF;
        return HTTP1_MORE;
    case CHUNK_SIZE_LF:
        h->state = h->left ? CHUNK : TRAILER;
        h->head_size = 0;
        h->digits = 0;
        return c == '\n' ? HTTP1_MORE : HTTP1_BAD_CHUNK;
    case CHUNK_CR:
        h->state = CHUNK_LF;
        return c == '\r' ? HTTP1_MORE : HTTP1_BAD_CHUNK;
    default: /* CHUNK_LF */
        h->state = CHUNK_SIZE;
        return c == '\n' ? HTTP1_MORE : HTTP1_BAD_CHUNK;
    }
}

static int feed_body(struct http1 *h, const uint8_t *bytes, size_t size, size_t *used, const struct http1_sink *sink)
{
    size_t piece = h->state != TO_END && size > h->left ? (size_t)h->left : size;
    *used = piece;
    if (!sink->body(sink->context, bytes, piece))
        return HTTP1_REFUSED;
    if (h->state == TO_END)
        return HTTP1_MORE;
    h->left -= piece;
    if (h->left)
        return HTTP1_MORE;
    if (h->state == LENGTH)
        return finish(h);
    h->state = CHUNK_CR;
    return HTTP1_MORE;
}

int http1_feed(struct http1 *h, const uint8_t *bytes, size_t size, size_t *used, const struct http1_sink *sink)
{
    int status = h->state == DONE ? HTTP1_DONE : HTTP1_MORE;
    size_t at = 0;
    while (at < size && status == HTTP1_MORE) {
        size_t step = 1;
        h->began = true;
        if (h->state == HEAD || h->state == TRAILER)
            status = feed_head(h, bytes + at, size - at, &step, sink);
        else if (h->state == LENGTH || h->state == TO_END || h->state == CHUNK)
            status = feed_body(h, bytes + at, size - at, &step, sink);
        else
            status = feed_framing(h, bytes[at]);
        at += step;
    }
    *used = at;
    return status;
}

int http1_end(struct http1 *h)
{
    if (h->state == DONE || h->state == TO_END)
        return finish(h);
    return h->began ? HTTP1_TRUNCATED : HTTP1_NO_ANSWER;
}
