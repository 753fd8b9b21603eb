/* The simulated server, its answers, and what the client must make of them. */
#ifndef SIMULATE_SERVER_H
#define SIMULATE_SERVER_H

#include "kernel.h"

enum { MOST_REQUESTS = 12, PORT = 8001, OTHER_PORT, REFUSING_PORT, SILENT_PORT };

/* What becomes of a request, if nothing stops it. */
enum fate {
    HANGS, /* there is no answer, or no end of it */
    COMPLETES,
    BREAKS,  /* the connection or the answer is broken */
    DROPPED, /* the server ended a reused connection without an answer: the client must send the request again */
};

/* Up to `wire` bytes of an answer contain `body` bytes of its body. */
struct mark {
    size_t wire, body;
};

/* A request and the answer to the last time that it was received. It is known by construction: nothing here parses an answer. */
struct order {
    const char *method;
    int port;
    struct vector sent_body;  /* of the request */
    int attempts, connection; /* connection: -1: none that the server accepted */
    int sent_on;              /* the connection on which it was last sent; -1: none */
    bool unowed;              /* on its connection were bytes that no request asked for, which arrived after it was sent */
    enum fate fate;
    int status;
    bool event_stream, needs_end;
    size_t start;         /* of the answer in the connection's bytes */
    size_t head, size;    /* bytes of the last head; bytes that are sent */
    size_t decides;       /* the fate is decided by the byte before this one */
    struct vector body;   /* of a whole answer */
    struct vector marks;  /* struct mark, ascending */
    struct vector events; /* size_t: where each event ends in `wire` */
    struct vector wire;
    int64_t dropped_ns; /* when the end of the reused connection arrived */
};

extern struct order orders[MOST_REQUESTS];

/* Neither bytes that no request asked for, nor answers before the end of a request: libcurl 7.88 sends a request on a connection on which
 * something has arrived, and does not read when sending fails. */
extern bool server_is_quiet;

struct server_counts {
    uint64_t reused, dropped, unowed, extra, large, early;
};
extern struct server_counts server_counts;

/* Bytes of the body that are in the first `received` bytes of the answer. */
size_t order_body(const struct order *o, size_t received);

/* When all bytes of a connection up to `end` had arrived; 0: they have not. */
int64_t arrival_of(const struct connection_log *c, size_t end);

/* When the fate was decided; 0: it is not. */
int64_t order_decided(const struct order *o);

void order_free(struct order *o);

#endif
