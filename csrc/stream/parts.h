/* What the parts of the client share. Each calls only those named after it: the loop (client.c), connections of our own for
 * plain HTTP/1.1 (plain.c), libcurl (libcurl.c), a request's life (transfer.c), what its answer leaves (answer.c).
 *
 * Plain HTTP/1.1, over TCP or a Unix socket: libcurl only resolves and connects; one recvmsg brings bytes and stamp.
 * TLS, HTTP/2 and proxies: libcurl transfers, and the socket is looked at for its stamp before libcurl reads it.
 */
#ifndef AQ_STREAM_PARTS_H
#define AQ_STREAM_PARTS_H

#include "clock.h"
#include "http1.h"
#include "plan.h"
#include "sse.h"

#include <curl/curl.h>

struct transfer;

enum { READ_BYTES = 64 << 10 };

/* A connection that libcurl made and left to us. */
struct connection {
    int fd;
    struct connection *next; /* in the list of idle ones */
    char *host_port;            /* host:port */
};

struct client {
    const struct plan *plan;
    struct plan_result *result;
    CURLM *multi;
    int epoll_fd, timer_fd;
    struct clock_pair pair;
    int64_t now_ns, now_kernel_ns; /* the stamps of the read in hand */
    bool now_overread;             /* libcurl may have read more than was there when the stamp was taken */
    int now_fd;                    /* the socket that libcurl reads; -1: its timer acts */
    int64_t now_received;          /* what that socket had received in all, just before its stamp was taken */
    uint64_t action;               /* a number for each read, so that what one read brought is seen as one */
    int now_errno;                 /* the socket error that looking for its stamp took away from libcurl */
    int64_t curl_due_ns;           /* when libcurl wants its timer called; INT64_MAX: never */
    int64_t check_due_ns;          /* no timeout can be due before this */
    int64_t armed_ns;              /* what timer_fd is set to */
    struct transfer *active;       /* the requests in flight */
    size_t in_flight;
    uint32_t *order; /* requests by their start */
    size_t next;     /* in `order` */
    struct vector sockets;   /* socket_state by fd */
    struct connection *idle; /* kept connections, the latest first */
    uint8_t *buffer;         /* READ_BYTES */
    bool no_memory;
};

struct socket_state {
    int64_t last_read_ns; /* when bytes of any kind last came, also those libcurl keeps to itself */
    bool stamped;         /* the kernel stamps what it receives */
    struct connection *connection; /* NULL: libcurl's */
    struct transfer *transfer; /* of a connection of our own; NULL: it is idle */
};

/* A request in flight. What each read touches comes first: with hundreds in flight it is seldom in the cache. */
struct transfer {
    struct client *client;
    struct connection *connection; /* our own; NULL: libcurl's */
    size_t unsent;                 /* of head and body, on a connection of our own */
    uint64_t last_action;          /* its last read's */
    size_t last_read, first_event; /* that read's row, and the first event row since */
    size_t read_events;            /* data events that this read completed */
    size_t answer_bytes, answer_events; /* of the body, and frames cut from it, so far */
    int64_t last_read_ns;
    uint32_t index;
    int fd; /* -1: not connected yet */
    bool began, body_began, event_stream;
    uint8_t cause; /* why it is being given up */
    struct sse framer;
    struct http1 reader;

    const struct plan_request *request;
    struct transfer *previous, *next;
    int64_t started_ns;
    /* Fills in the row's phases and gives back what carried the request; NULL: nothing does yet. */
    void (*release)(struct transfer *t, struct request_row *row);
    int32_t status;
    int socket_errno;
    struct vector header, body; /* the answer's */
    char error[CURL_ERROR_SIZE];
    /* libcurl */
    CURL *easy; /* transfers or, with a place, connects */
    struct curl_slist *headers;
    const char *last_bytes; /* where the last read's latest piece lay in libcurl's buffer */
    /* plain HTTP/1.1 */
    char *host_port;        /* host:port; NULL: libcurl transfers */
    struct vector head; /* the request's, as sent */
    bool reused;          /* on a connection that carried a request before */
};

static inline struct request_row *client_row(const struct client *c, uint32_t index)
{
    return (struct request_row *)c->result->requests.base + index;
}

/* NULL for a descriptor that libcurl.c did not make. */
static inline struct socket_state *client_socket(const struct client *c, int fd)
{
    bool known = fd >= 0 && (size_t)fd < c->sockets.size / sizeof(struct socket_state);
    return known ? (struct socket_state *)c->sockets.base + fd : NULL;
}

/* ---- answer.c: with the stamps of client.now_* */

void answer_first_byte(struct transfer *t);
bool answer_line(struct transfer *t, const char *line, size_t size);
void answer_begin_body(struct transfer *t, int status, const char *type);

/* False: the answer cannot be kept, and says why in its cause. */
bool answer_body(struct transfer *t, const void *bytes, size_t size);
void answer_end(struct transfer *t);

/* ---- transfer.c */

/* A request begins, with nothing to carry it yet. NULL: memory is out. */
struct transfer *transfer_begin(struct client *c, uint32_t index);

/* Ends it: what is left is framed, its row is filled in, what carried it is given back. */
void transfer_finish(struct transfer *t, CURLcode code, uint8_t cause);

/* ---- libcurl.c */

/* Hands the request to libcurl: to transfer or, with a place, to connect. False: memory is out. */
bool libcurl_begin(struct transfer *t);

/* What making the connection took, into the request's row. */
void libcurl_store_phases(struct transfer *t, struct request_row *row);
void libcurl_release(struct transfer *t);

/* ---- plain.c */

/* Whether the request can go over a connection of our own: then its place and head are made. False: out of memory. */
bool plain_prepare(struct transfer *t);

/* Takes a kept connection to the request's place and sends. False: there is none. */
bool plain_reuse(struct transfer *t);

/* The connection is made: takes it from libcurl and sends. */
void plain_connected(struct transfer *t);

/* epoll has something to say about a connection of our own. */
void plain_ready(struct client *c, struct socket_state *socket, uint32_t events);

void plain_close_idle(struct client *c);

#endif
