/* What the loop (client.c) and one request's transfer (transfer.c) share. */
#ifndef AQ_STREAM_CLIENT_H
#define AQ_STREAM_CLIENT_H

#include "clock.h"
#include "plan.h"
#include "sse.h"

#include <curl/curl.h>

struct transfer;

struct client {
    const struct plan *plan;
    struct plan_result *result;
    CURLM *multi;
    int epoll_fd, timer_fd;
    struct clock_pair pair;
    int64_t now_ns, now_kernel_ns; /* the stamps of the read in hand */
    int now_fd;                    /* the socket that is read; -1: libcurl's timer acts */
    uint64_t action;               /* a number for each read, so that what one read brought is seen as one */
    int now_errno;                 /* the socket error that looking for its stamp took away from libcurl */
    int64_t curl_due_ns;           /* when libcurl wants its timer called; INT64_MAX: never */
    int64_t check_due_ns;          /* no timeout can be due before this */
    int64_t armed_ns;              /* what timer_fd is set to */
    struct transfer *active;       /* the requests in flight */
    size_t in_flight;
    uint32_t *order; /* requests by their start */
    size_t next;     /* in `order` */
    struct vector sockets; /* socket_state by fd */
    bool no_memory;
};

struct socket_state {
    int64_t last_read_ns; /* when bytes of any kind last came, also those libcurl keeps to itself */
    bool stamped;         /* the kernel stamps what it receives */
};

struct transfer {
    struct client *client;
    const struct plan_request *request;
    struct transfer *previous, *following;
    CURL *easy;
    struct curl_slist *headers;
    uint32_t index;
    int fd; /* -1: not connected yet */
    int64_t started_ns, last_read_ns;
    uint64_t last_action;         /* its last read's */
    const char *last_bytes;       /* where that read's latest piece lay in libcurl's buffer */
    size_t last_read, first_event; /* that read's row, and the first event row since */
    int32_t status;
    bool body_began, event_stream;
    uint8_t cause; /* why it is being given up */
    int socket_errno;
    struct sse framer;
    struct vector header, body;
    char error[CURL_ERROR_SIZE];
};

struct request_row *client_row(const struct client *c, uint32_t index);

/* NULL for a descriptor that on_open did not make. */
struct socket_state *client_socket(const struct client *c, int fd);

/* Begins a request: a handle of its own, given to the multi handle. False when libcurl has no handle to give. */
bool transfer_start(struct client *c, uint32_t index);

/* Ends it: what is left is framed, its row is filled in, the handle is given back. */
void transfer_finish(struct transfer *t, CURLcode code, uint8_t cause);

#endif
