/* The request of request.h. URLs are parsed by libcurl, so that both carriers read a URL in the same way. */
#define _GNU_SOURCE
#include "request.h"

#include <curl/curl.h>
#include <stdio.h>

enum { HOST_BYTES = 256, LENGTH_DIGITS = 20 };

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

static bool is_visible_ascii(const char *text)
{
    while (*text > ' ' && *text < 0x7f)
        text++;
    return *text == 0;
}

static bool join(char **result, const char *a, const char *between, const char *b)
{
    size_t size = strlen(a) + strlen(between) + strlen(b) + 1;
    *result = malloc(size);
    if (*result)
        snprintf(*result, size, "%s%s%s", a, between, b);
    return *result != NULL;
}

/* Fill in origin, host and target, or none of them: URLs that cannot be used here, international names among them, are left to libcurl,
 * which encodes or explains them. */
static bool split_url(struct request *r)
{
    char *host = NULL, *port = NULL, *path = NULL, *query = NULL, *user = NULL, *zone = NULL;
    bool ok = true;
    if (!text_begins((struct text){r->url, strlen(r->url)}, "http://"))
        return true;
    CURLU *parts = curl_url();
    if (!parts)
        return false;
    if (curl_url_set(parts, CURLUPART_URL, r->url, CURLU_URLENCODE) || curl_url_get(parts, CURLUPART_HOST, &host, 0) ||
        curl_url_get(parts, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT) || curl_url_get(parts, CURLUPART_PATH, &path, 0))
        goto out;
    curl_url_get(parts, CURLUPART_QUERY, &query, 0);
    curl_url_get(parts, CURLUPART_USER, &user, 0);
    curl_url_get(parts, CURLUPART_ZONEID, &zone, 0);
    bool usable = !user && !zone && strlen(host) < HOST_BYTES && path[0] == '/' && is_visible_ascii(host) && is_visible_ascii(path) &&
                  (!query || is_visible_ascii(query));
    if (!usable)
        goto out;
    bool usual = strcmp(port, "80") == 0;
    ok = join(&r->origin, host, ":", port) && join(&r->host, host, usual ? "" : ":", usual ? "" : port) &&
         join(&r->target, path, query ? "?" : "", query ? query : "");
out:
    curl_free(host);
    curl_free(port);
    curl_free(path);
    curl_free(query);
    curl_free(user);
    curl_free(zone);
    curl_url_cleanup(parts);
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
    r->has_host = has_field(q, "Host");
    r->has_type = has_field(q, "Content-Type");
    return add_fields(q, r) && split_url(r) ? REQUEST_OK : REQUEST_NO_MEMORY;
}

void request_free(struct request *r)
{
    vector_free(&r->fields);
    free(r->origin);
    free(r->host);
    free(r->target);
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

static bool add_text(struct vector *head, const char *text)
{
    return vector_add(head, text, strlen(text)) == 0;
}

bool request_write_head(const struct request *r, struct vector *head)
{
    char length[sizeof "Content-Length: \r\n" + LENGTH_DIGITS] = "";
    if (r->states_length)
        snprintf(length, sizeof length, "Content-Length: %zu\r\n", r->body_size);
    bool ok = add_text(head, r->method) && add_text(head, " ") && add_text(head, r->target) && add_text(head, " HTTP/1.1\r\n");
    if (ok && !r->has_host)
        ok = add_text(head, "Host: ") && add_text(head, r->host) && add_text(head, "\r\n");
    const char *name, *value;
    for (size_t at = 0; ok && request_next_field(r, &at, &name, &value);)
        ok = add_text(head, name) && add_text(head, *value ? ": " : ":") && add_text(head, value) && add_text(head, "\r\n");
    return ok && add_text(head, length) && add_text(head, "\r\n");
}
