/* What the parts of the client share: the loop (client.c), a request's life (transfer.c), what its answer leaves
 * (answer.c), and connections of our own for plain HTTP/1.1 (plain.c).
 *
 * Plain HTTP/1.1, over TCP or a Unix socket: libcurl only resolves and connects; one recvmsg brings bytes and stamp.
 * TLS, HTTP/2 and proxies: libcurl transfers, and the socket is looked at for its stamp before libcurl reads it.
 */
#ifndef AQ_STREAM_CLIENT_H
#define AQ_STREAM_CLIENT_H

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
    struct transfer *owner; /* NULL: idle */
    struct connection *following; /* in the list of idle ones */
    char *place;            /* host:port */
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
    struct connection *own; /* NULL: libcurl's */
};

struct transfer {
    struct client *client;
    const struct plan_request *request;
    struct transfer *previous, *following;
    CURL *easy; /* NULL: on a connection of our own */
    struct curl_slist *headers;
    uint32_t index;
    int fd; /* -1: not connected yet */
    int64_t started_ns, last_read_ns;
    uint64_t last_action;          /* its last read's */
    const char *last_bytes;        /* where that read's latest piece lay in libcurl's buffer */
    size_t last_read, first_event; /* that read's row, and the first event row since */
    size_t read_events;            /* data events that this read completed */
    int32_t status;
    bool body_began, event_stream;
    uint8_t cause; /* why it is being given up */
    int socket_errno;
    struct sse framer;
    struct vector header, body;
    char error[CURL_ERROR_SIZE];
    /* plain HTTP/1.1 */
    struct connection *connection;
    char *place;        /* host:port; NULL: libcurl transfers */
    struct vector head; /* the request's, as sent */
    size_t sent;        /* of head and body */
    bool kept;          /* on a connection that carried a request before */
    struct http1 reader;
};

struct request_row *client_row(const struct client *c, uint32_t index);

/* NULL for a descriptor that transfer_open_socket did not make. */
struct socket_state *client_socket(const struct client *c, int fd);

/* ---- transfer.c */

/* Begins a request. False when memory is out or libcurl has no handle to give. */
bool transfer_start(struct client *c, uint32_t index);

/* Hands the request's handle to libcurl: to transfer, or (with a place) to connect. */
bool transfer_add(struct transfer *t);

/* libcurl is done with the handle: the request has ended or, with a place, has its connection. */
void transfer_message(struct transfer *t, CURLcode code);

/* The phases of making the connection, into the request's row. */
void transfer_keep_connecting(struct transfer *t);

/* Ends it: what is left is framed, its row is filled in, the handle is given back. */
void transfer_finish(struct transfer *t, CURLcode code, uint8_t cause);

/* ---- answer.c: with the stamps of client.now_* */

void answer_first_byte(struct transfer *t);
bool answer_line(struct transfer *t, const char *line, size_t size);
void answer_begin_body(struct transfer *t, int status, const char *type);
bool answer_body(struct transfer *t, const void *bytes, size_t size);
void answer_end(struct transfer *t);

/* ---- plain.c */

/* Whether the request can go over a connection of our own: then its place and head are made. False: out of memory. */
bool plain_prepare(struct transfer *t);

/* Takes a kept connection to the request's place and sends. False: there is none. */
bool plain_reuse(struct transfer *t);

/* The connection is made: takes it from libcurl and sends. */
void plain_connected(struct transfer *t);

/* epoll has something to say about a connection of our own. */
void plain_ready(struct client *c, struct connection *connection, uint32_t events);

/* The request is over: keeps its connection for another if it ended well, or closes it. */
void plain_release(struct transfer *t, bool well);

void plain_close_idle(struct client *c);

#endif
