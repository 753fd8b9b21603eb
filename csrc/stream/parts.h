/* The types and functions that the parts of the client share. Each part calls only those after it:
 *
 * - client.c: the loop
 * - plain.c: carrier of HTTP/1.1 without TLS, over TCP or a Unix socket: the client's own connections; one recvmsg returns data and stamp
 * - connect.c: opens these connections: name lookup and connect by libcurl
 * - libcurl.c: carrier of TLS, HTTP/2 and proxies: libcurl transfers, and the socket's stamp is read before libcurl reads the socket
 * - multi.c: libcurl's multi handle in the loop
 * - handle.c: libcurl's easy handles: options, sockets, phases
 * - transfer.c: start and end of a request
 * - answer.c: storage of its answer
 */
#ifndef AQ_STREAM_PARTS_H
#define AQ_STREAM_PARTS_H

#include "clock.h"
#include "http1.h"
#include "plan.h"
#include "sse.h"

#include <curl/curl.h>

struct client;
struct transfer;

/* How a request is sent and its answer received. */
struct carrier {
    /* Begin to send the request. Returns false if memory is exhausted; the request may have ended when it returns. */
    bool (*begin)(struct transfer *t);
    /* Handle epoll's events of one of the carrier's sockets. */
    void (*ready)(struct client *c, int fd, uint32_t events);
    /* The request has ended: fill in the row's phases and release what the carrier holds for it. */
    void (*leave)(struct transfer *t, struct request_row *row);
};

extern const struct carrier carrier_plain, carrier_libcurl;

enum { READ_BYTES = 64 << 10 };

/* A connection that this client owns. */
struct connection {
    int fd;
    struct connection *next; /* in the list of idle connections */
    char *origin;            /* host:port */
};

struct client {
    const struct plan *plan;
    struct plan_result *result;
    CURLM *multi;
    int epoll_fd, timer_fd;
    struct clock_pair pair;
    int64_t now_ns, now_kernel_ns; /* the stamps of the current read */
    bool now_overread;             /* libcurl may have read data that arrived after the stamp was taken */
    uint64_t action;               /* number of the current read, so that all parts of one read are recognised */
    int now_errno;                 /* the socket error that reading the stamp consumed */
    int64_t curl_due_ns;           /* when libcurl's timer is due; INT64_MAX: never */
    int64_t check_due_ns;          /* no timeout is due before this time */
    int64_t armed_ns;              /* the time that timer_fd is set to */
    struct transfer *active;       /* requests in flight */
    size_t in_flight;
    uint32_t *order;         /* requests by start time */
    size_t next;             /* index in `order` */
    struct vector sockets;   /* socket_state by fd */
    struct connection *idle; /* reusable connections, the latest first */
    uint8_t *buffer;         /* READ_BYTES */
    bool no_memory;
};

/* All zero: the descriptor is not a socket that handle.c opened and that is still open. */
struct socket_state {
    const struct carrier *carrier; /* which handles its events */
    struct transfer *transfer;     /* of a client's own connection; NULL: it is idle */
    int64_t last_read_ns;          /* time of the last received bytes of any kind, including those that libcurl does not pass on */
    struct connection *connection; /* the client's own */
    bool stamped;                  /* the kernel stamps its data */
    /* Of libcurl's sockets: the newest stamps, and the total of bytes received just before they were taken. They are valid for all data
     * that libcurl passes on while that total is unchanged. kernel_ns 0: none. */
    int64_t user_ns, kernel_ns, received;
    bool outrun; /* it has changed since */
};

/* A request in flight. The fields that each read uses are first: with hundreds in flight they are rarely in the cache. */
struct transfer {
    struct client *client;
    struct connection *connection;      /* plain.c; NULL until it is connected */
    size_t unsent;                      /* plain.c: bytes of head and body */
    uint64_t last_action;               /* of its last read */
    size_t last_read, first_event;      /* row of that read, and the first event row since */
    size_t read_events;                 /* data events that this read completed */
    size_t answer_bytes, answer_events; /* of the body, and of its frames, so far */
    int64_t last_read_ns;
    uint32_t index;
    int fd; /* -1: not connected yet */
    bool began, body_began, event_stream;
    uint8_t cause; /* why it is being ended */
    struct sse framer;
    struct http1 reader; /* plain.c */

    const struct carrier *carrier;
    const struct plan_request *plan;
    const struct request *request;
    struct transfer *previous, *next;
    int64_t started_ns, sent_ns; /* sent_ns: the last time that the carrier began to send it */
    int32_t status;
    int socket_errno;
    bool final_head, head_ended; /* the current head is not a 1xx answer's; its blank line has been received */
    size_t head_bytes;           /* of all heads and trailers */
    struct vector header, body;  /* of the answer */
    char error[CURL_ERROR_SIZE];
    /* handle.c: libcurl transfers or connects */
    CURL *easy;
    void (*done)(struct transfer *t, CURLcode code); /* called when libcurl has finished with `easy` */
    /* libcurl.c */
    struct curl_slist *lines;
    int shared_fd;                   /* if `fd` is -1: the socket of the connection that it shares; -1: unknown */
    const char *last_bytes;          /* position of the last read's latest part in libcurl's buffer */
    int64_t read_ns, read_kernel_ns; /* stamps of the last read */
    /* plain.c */
    struct vector head; /* of the request, as sent */
    bool reused;        /* on a connection that carried an earlier request */
};

static inline struct request_row *client_row(const struct client *c, uint32_t index)
{
    return (struct request_row *)c->result->requests.base + index;
}

/* Return NULL for a descriptor above all that handle.c opened. */
static inline struct socket_state *client_socket(const struct client *c, int fd)
{
    bool known = fd >= 0 && (size_t)fd < c->sockets.size / sizeof(struct socket_state);
    return known ? (struct socket_state *)c->sockets.base + fd : NULL;
}

/* ---- answer.c: uses the stamps client.now_* */

void answer_first_byte(struct transfer *t);

/* Store a line of a head. Trailers are counted and not stored: they cannot replace a field of the head. Returns false if the line cannot
 * be stored; the transfer's cause has the reason. */
bool answer_line(struct transfer *t, const char *line, size_t size);
void answer_begin_body(struct transfer *t, int status, const char *type);

/* Return false if the answer cannot be stored; the transfer's cause has the reason. */
bool answer_body(struct transfer *t, const void *bytes, size_t size);
void answer_end(struct transfer *t);

/* ---- transfer.c */

/* Start a request, without its carrier. Returns NULL if memory is exhausted. */
struct transfer *transfer_begin(struct client *c, uint32_t index, const struct carrier *carrier);

/* End a request: frame the rest of its body, fill in its row, release its carrier. */
void transfer_finish(struct transfer *t, CURLcode code, uint8_t cause);

/* The same with an error text. */
void transfer_fail(struct transfer *t, CURLcode code, const char *error);

/* The carrier sends the request, or sends it again. */
void transfer_sending(struct transfer *t);

/* Store the error number of a request that failed: the socket's own, else libcurl's. */
void transfer_store_errno(const struct transfer *t, struct request_row *row);

/* ---- handle.c */

/* Make the transfer's easy handle with the options of every connection; `carrier` handles the events of its sockets. Returns libcurl's
 * error, and describes the refused option in the transfer's error text. */
CURLcode handle_open(struct transfer *t, void (*done)(struct transfer *t, CURLcode code));

/* curl_easy_setopt whose failure is returned and described. */
#define handle_set(t, option, value) handle_explain(t, #option, curl_easy_setopt((t)->easy, option, value))
CURLcode handle_explain(struct transfer *t, const char *option, CURLcode code);

/* Pass the handle to the multi handle, or end the request with `code` if that is an error. Returns false if memory is exhausted. */
bool handle_start(struct transfer *t, CURLcode code);

/* Store the phases of the connection in the request's row. */
void handle_store_phases(struct transfer *t, struct request_row *row);
int64_t handle_info_us(CURL *easy, CURLINFO which);
void handle_close(struct transfer *t);

/* ---- multi.c */

bool multi_open(struct client *c);

/* Let libcurl handle its timer, or the events of its socket or of a descriptor that is not known here. */
void multi_timer(struct client *c);
void multi_ready(struct client *c, int fd, uint32_t events);

/* ---- connect.c */

/* Connect to the request's origin; plain_connected or transfer_finish is called with the result. Returns false if memory is exhausted. */
bool connect_begin(struct transfer *t);

/* ---- plain.c */

/* Send the request on the connection of t->easy, which passes to plain.c. */
void plain_connected(struct transfer *t);
void plain_close_idle(struct client *c);

#endif
