/* The types and functions that the parts of the client share. Each part calls only those after it: the loop (client.c), plain HTTP/1.1 on
 * the client's own connections (plain.c), libcurl (libcurl.c), start and end of a request (transfer.c), storage of its answer (answer.c).
 *
 * Plain HTTP/1.1, over TCP or a Unix socket: libcurl only resolves and connects; one recvmsg returns data and stamp.
 * TLS, HTTP/2 and proxies: libcurl transfers, and the socket's stamp is read before libcurl reads the socket.
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

/* A connection that libcurl made and that this client owns. */
struct connection {
    int fd;
    struct connection *next; /* in the list of idle connections */
    char *host_port;            /* host:port */
};

struct client {
    const struct plan *plan;
    struct plan_result *result;
    CURLM *multi;
    int epoll_fd, timer_fd;
    struct clock_pair pair;
    int64_t now_ns, now_kernel_ns; /* the stamps of the current read */
    bool now_overread;             /* libcurl may have read data that arrived after the stamp was taken */
    int now_fd;                    /* the socket that libcurl reads; -1: its timer runs */
    int64_t now_received;          /* bytes that this socket had received in total just before its stamp was taken */
    uint64_t action;               /* number of the current read, so that all parts of one read are recognised */
    int now_errno;                 /* the socket error that reading the stamp consumed */
    int64_t curl_due_ns;           /* when libcurl's timer is due; INT64_MAX: never */
    int64_t check_due_ns;          /* no timeout is due before this time */
    int64_t armed_ns;              /* the time that timer_fd is set to */
    struct transfer *active;       /* requests in flight */
    size_t in_flight;
    uint32_t *order; /* requests by start time */
    size_t next;     /* index in `order` */
    struct vector sockets;   /* socket_state by fd */
    struct connection *idle; /* reusable connections, the latest first */
    uint8_t *buffer;         /* READ_BYTES */
    bool no_memory;
};

struct socket_state {
    int64_t last_read_ns; /* time of the last received bytes of any kind, including those that libcurl does not pass on */
    bool stamped;         /* the kernel stamps its data */
    struct connection *connection; /* NULL: libcurl's socket */
    struct transfer *transfer; /* of a client's own connection; NULL: it is idle */
};

/* A request in flight. The fields that each read uses are first: with hundreds in flight they are rarely in the cache. */
struct transfer {
    struct client *client;
    struct connection *connection; /* the client's own; NULL: libcurl's */
    size_t unsent;                 /* bytes of head and body, on a client's own connection */
    uint64_t last_action;          /* of its last read */
    size_t last_read, first_event; /* row of that read, and the first event row since */
    size_t read_events;            /* data events that this read completed */
    size_t answer_bytes, answer_events; /* of the body, and of its frames, so far */
    int64_t last_read_ns;
    uint32_t index;
    int fd; /* -1: not connected yet */
    bool began, body_began, event_stream;
    uint8_t cause; /* why it is being ended */
    struct sse framer;
    struct http1 reader;

    const struct plan_request *request;
    struct transfer *previous, *next;
    int64_t started_ns;
    /* Fill in the row's phases and release the carrier; NULL: there is none yet. */
    void (*release)(struct transfer *t, struct request_row *row);
    int32_t status;
    int socket_errno;
    struct vector header, body; /* of the answer */
    char error[CURL_ERROR_SIZE];
    /* libcurl */
    CURL *easy; /* transfers or, with a host_port, connects */
    struct curl_slist *headers;
    const char *last_bytes; /* position of the last read's latest part in libcurl's buffer */
    /* plain HTTP/1.1 */
    char *host_port;        /* host:port; NULL: libcurl transfers */
    struct vector head; /* of the request, as sent */
    bool reused;          /* on a connection that carried an earlier request */
};

static inline struct request_row *client_row(const struct client *c, uint32_t index)
{
    return (struct request_row *)c->result->requests.base + index;
}

/* Return NULL for a descriptor that libcurl.c did not open. */
static inline struct socket_state *client_socket(const struct client *c, int fd)
{
    bool known = fd >= 0 && (size_t)fd < c->sockets.size / sizeof(struct socket_state);
    return known ? (struct socket_state *)c->sockets.base + fd : NULL;
}

/* ---- answer.c: uses the stamps client.now_* */

void answer_first_byte(struct transfer *t);
bool answer_line(struct transfer *t, const char *line, size_t size);
void answer_begin_body(struct transfer *t, int status, const char *type);

/* Return false if the answer cannot be stored; the transfer's cause has the reason. */
bool answer_body(struct transfer *t, const void *bytes, size_t size);
void answer_end(struct transfer *t);

/* ---- transfer.c */

/* Start a request, without a carrier. Returns NULL if memory is exhausted. */
struct transfer *transfer_begin(struct client *c, uint32_t index);

/* End a request: frame the rest of its body, fill in its row, release its carrier. */
void transfer_finish(struct transfer *t, CURLcode code, uint8_t cause);

/* ---- libcurl.c */

/* Start libcurl: to transfer the request or, with a host_port, to connect. Returns false if memory is exhausted. */
bool libcurl_begin(struct transfer *t);

/* Store the phases of the connection in the request's row. */
void libcurl_store_phases(struct transfer *t, struct request_row *row);
void libcurl_release(struct transfer *t);

/* ---- plain.c */

/* Prepare host_port and head if the request can use a client's own connection. Returns false if memory is exhausted. */
bool plain_prepare(struct transfer *t);

/* Send on an idle connection to the request's host_port. Returns false if there is none. */
bool plain_reuse(struct transfer *t);

/* Take over the connection from libcurl and send the request. */
void plain_connected(struct transfer *t);

/* Handle epoll's events of a client's own connection. */
void plain_ready(struct client *c, struct socket_state *socket, uint32_t events);

void plain_close_idle(struct client *c);

#endif
