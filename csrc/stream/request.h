/* One request as it is sent. It is checked and completed once, before the run, and libcurl sends the result.
 *
 * Method and field names are tokens (RFC 9110 5.6.2). No text may have a control byte, so that nothing in it can end a line and begin a
 * second request. The length of the body is stated here only. Fields that concern one connection (RFC 9110 7.6.1) are refused, because
 * the client decides about connections. Names are compared without regard to case, and each may be given once.
 */
#ifndef AQ_STREAM_REQUEST_H
#define AQ_STREAM_REQUEST_H

#include "text.h"
#include "vector.h"

#include <stdbool.h>
#include <stddef.h>

/* UTF-8, and each text also ends with a NUL: one within its size is detected and refused. */
struct field {
    struct text name, value;
};

/* A request as the caller states it; texts as in `field`. The pointers belong to the caller and must outlive the `struct request` made of
 * it. */
struct request_spec {
    struct text url, method;
    const struct field *fields;
    size_t field_count;
    const char *body; /* NULL: none */
    size_t body_size;
    const char *user_agent; /* used if the fields have none; NULL: none */
};

enum request_status {
    REQUEST_OK = 0,
    REQUEST_NO_MEMORY,
    REQUEST_BAD_METHOD,
    REQUEST_CONNECT,     /* method CONNECT: it asks for a tunnel, not for a resource */
    REQUEST_METHOD_BODY, /* HEAD or TRACE with a body */
    REQUEST_BAD_URL,
    REQUEST_BAD_SCHEME,
    REQUEST_BAD_NAME,
    REQUEST_BAD_VALUE,
    REQUEST_BAD_HOST,
    REQUEST_DUPLICATE,
    REQUEST_HOP_BY_HOP,
    REQUEST_EXPECT,
    REQUEST_BAD_LENGTH, /* a Content-Length that is not the body's */
};

/* A complete request. Its fields do not include Content-Length, and Host only if the caller stated it. */
struct request {
    const char *url, *method;
    const char *body;
    size_t body_size;
    bool head;          /* HEAD: the answer has no body */
    bool states_length; /* the message has a Content-Length */
    bool has_type;
    struct vector fields; /* names and values in turn, each ended by a NUL */
};

/* Check and complete a request. *at: the index of the field that was refused. Returns a request_status; the result must be freed in any
 * case. */
int request_normalise(const struct request_spec *spec, struct request *r, size_t *at);
void request_free(struct request *r);

/* Read the field at offset *at of `fields`, 0 for the first, and set *at to the next one. Returns false at the end. */
bool request_next_field(const struct request *r, size_t *at, const char **name, const char **value);

/* Return the description of a status. */
const char *request_explain(int status);

#endif
