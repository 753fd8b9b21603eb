/* The request of request.h. */
#define _GNU_SOURCE
#include "request.h"

#include <stdio.h>

enum { LENGTH_DIGITS = 20 };

const char *request_explain(int status)
{
    switch (status) {
    case REQUEST_NO_MEMORY:
        return "no memory for the request";
    case REQUEST_BAD_METHOD:
        return "the method is not a token (letters, digits and !#$%&'*+-.^_`|~)";
    case REQUEST_CONNECT:
        return "the method CONNECT is not supported: it requests a tunnel";
    case REQUEST_METHOD_BODY:
        return "a HEAD or TRACE request has no body";
    case REQUEST_BAD_URL:
        return "the URL has a line break or another control character";
    case REQUEST_BAD_SCHEME:
        return "not an http:// or https:// URL";
    case REQUEST_BAD_NAME:
        return "the name is not a token (letters, digits and !#$%&'*+-.^_`|~)";
    case REQUEST_BAD_VALUE:
        return "the value has a line break or another control character";
    case REQUEST_BAD_HOST:
        return "the value is not a host with an optional port";
    case REQUEST_DUPLICATE:
        return "the name is given twice (names are compared without regard to case)";
    case REQUEST_HOP_BY_HOP:
        return "it concerns one connection (RFC 9110 7.6.1), and the client decides about connections";
    case REQUEST_EXPECT:
        return "it adds a round trip that the client does not make: the body is sent at once";
    case REQUEST_BAD_LENGTH:
        return "it is not the body's length, which the client states itself";
    default:
        return "";
    }
}

/* ---- texts */

static bool is_token(struct text t)
{
    for (size_t i = 0; i < t.size; i++)
        if (!text_is_tchar(t.at[i]))
            return false;
    return t.size > 0;
}

static bool has_control(struct text t, bool tab_is_allowed)
{
    for (size_t i = 0; i < t.size; i++) {
        unsigned char c = (unsigned char)t.at[i];
        if (c == 0x7f || (c < ' ' && !(c == '\t' && tab_is_allowed)))
            return true;
    }
    return false;
}

static bool is_method(const struct request_spec *q, const char *method)
{
    return q->method.size == strlen(method) && memcmp(q->method.at, method, q->method.size) == 0;
}

/* ---- checks */

static bool is_hop_by_hop(struct text name)
{
    static const char *const names[] = {
        "Connection",
        "Keep-Alive",
        "Proxy-Connection",
        "Proxy-Authenticate",
        "Proxy-Authorization",
        "Proxy-Authentication-Info",
        "TE",
        "Trailer",
        "Transfer-Encoding",
        "Upgrade",
        "HTTP2-Settings",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (text_is(name, names[i]))
            return true;
    return false;
}

static bool is_body_length(struct text value, size_t body_size)
{
    char expected[LENGTH_DIGITS + 1];
    snprintf(expected, sizeof expected, "%zu", body_size);
    return text_is(value, expected);
}

/* RFC 9110 7.2: uri-host [ ":" port ]. */
static bool is_host(struct text value)
{
    for (size_t i = 0; i < value.size; i++)
        if (value.at[i] == ' ' || value.at[i] == '\t' || strchr("/?#@\\,\"<>", value.at[i]))
            return false;
    return true;
}

static int check_method(const struct request_spec *q)
{
    if (!is_token(q->method))
        return REQUEST_BAD_METHOD;
    if (text_is(q->method, "CONNECT"))
        return REQUEST_CONNECT;
    if (q->body && (is_method(q, "HEAD") || is_method(q, "TRACE")))
        return REQUEST_METHOD_BODY;
    return REQUEST_OK;
}

static int check_url(struct text url)
{
    bool http = url.size > 7 && text_begins(url, "http://");
    bool https = url.size > 8 && text_begins(url, "https://");
    if (has_control(url, false))
        return REQUEST_BAD_URL;
    return http || https ? REQUEST_OK : REQUEST_BAD_SCHEME;
}

static int check_field(const struct request_spec *q, size_t index)
{
    struct text name = q->fields[index].name, value = text_trimmed(q->fields[index].value);
    if (!is_token(name))
        return REQUEST_BAD_NAME;
    if (has_control(value, true))
        return REQUEST_BAD_VALUE;
    if (is_hop_by_hop(name))
        return REQUEST_HOP_BY_HOP;
    if (text_is(name, "Expect"))
        return REQUEST_EXPECT;
    if (text_is(name, "Content-Length") && !is_body_length(value, q->body_size))
        return REQUEST_BAD_LENGTH;
    if (text_is(name, "Host") && !is_host(value))
        return REQUEST_BAD_HOST;
    for (size_t i = 0; i < index; i++)
        if (text_equal(q->fields[i].name, name))
            return REQUEST_DUPLICATE;
    return REQUEST_OK;
}

/* ---- the result */

static bool add_field(struct request *r, struct text name, struct text value)
{
    return vector_add(&r->fields, name.at, name.size) == 0 && vector_add(&r->fields, "", 1) == 0 &&
           vector_add(&r->fields, value.at, value.size) == 0 && vector_add(&r->fields, "", 1) == 0;
}

static bool has_field(const struct request_spec *q, const char *name)
{
    for (size_t i = 0; i < q->field_count; i++)
        if (text_is(q->fields[i].name, name))
            return true;
    return false;
}

static bool add_default(const struct request_spec *q, struct request *r, const char *name, const char *value)
{
    if (!value || has_field(q, name))
        return true;
    return add_field(r, (struct text){name, strlen(name)}, (struct text){value, strlen(value)});
}

static bool add_fields(const struct request_spec *q, struct request *r)
{
    bool ok = add_default(q, r, "User-Agent", q->user_agent) && add_default(q, r, "Accept", "*/*");
    for (size_t i = 0; ok && i < q->field_count; i++)
        if (!text_is(q->fields[i].name, "Content-Length"))
            ok = add_field(r, q->fields[i].name, text_trimmed(q->fields[i].value));
    return ok;
}

int request_normalise(const struct request_spec *q, struct request *r, size_t *at)
{
    memset(r, 0, sizeof *r);
    *at = 0;
    int status = check_method(q);
    if (status == REQUEST_OK)
        status = check_url(q->url);
    for (; status == REQUEST_OK && *at < q->field_count; ++*at)
        if ((status = check_field(q, *at)) != REQUEST_OK)
            break;
    if (status != REQUEST_OK)
        return status;
    r->url = q->url.at;
    r->method = q->method.at;
    r->body = q->body;
    r->body_size = q->body ? q->body_size : 0;
    r->head = is_method(q, "HEAD");
    /* RFC 9110 8.6: a length of 0 is stated if the method usually has a body. */
    r->states_length = q->body || is_method(q, "POST") || is_method(q, "PUT") || is_method(q, "PATCH");
    r->has_type = has_field(q, "Content-Type");
    return add_fields(q, r) ? REQUEST_OK : REQUEST_NO_MEMORY;
}

void request_free(struct request *r)
{
    vector_free(&r->fields);
    memset(r, 0, sizeof *r);
}

bool request_next_field(const struct request *r, size_t *at, const char **name, const char **value)
{
    if (*at == r->fields.size)
        return false;
    *name = (const char *)r->fields.base + *at;
    *value = *name + strlen(*name) + 1;
    *at += strlen(*name) + strlen(*value) + 2;
    return true;
}
