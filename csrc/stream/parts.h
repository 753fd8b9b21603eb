/* The types and functions that the parts of the client share. libcurl transfers every request; a socket's stamp is read before libcurl
 * reads the socket. Each part calls only those after it:
 *
 * - client.c: the loop
 * - multi.c: libcurl's multi handle in the loop
 * - handle.c: libcurl's easy handles: the request as options, sockets, phases
 * - receive.c: what libcurl passes on, and its stamps
 * - transfer.c: start and end of a request
 * - answer.c: checks and storage of its answer
 */
#ifndef AQ_STREAM_PARTS_H
#define AQ_STREAM_PARTS_H

#include "clock.h"
#include "plan.h"
#include "sse.h"

#include <curl/curl.h>

struct transfer;

enum { READ_BYTES = 64 << 10 };

struct client {
    const struct plan *plan;
    struct plan_result *result;
    CURLM *multi;
    int epoll_fd, timer_fd;
    int idle_fd; /* epoll of the connections that no request uses */
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
    uint32_t *order;       /* requests by start time */
    size_t next;           /* index in `order` */
    struct vector sockets; /* socket_state by fd */
    uint8_t *buffer;       /* READ_BYTES */
    bool no_memory;
};

/* All zero: the descriptor is not a socket that handle.c opened and that is still open. */
struct socket_state {
    bool open;
    bool stamped;         /* the kernel stamps its data */
    bool idle;            /* watched by idle_fd */
    bool outrun;          /* libcurl has read more than `received` */
    int64_t last_read_ns; /* time of the last received bytes of any kind, including those that libcurl does not pass on */
    /* The newest stamps, and the total of bytes received just before they were taken: they are valid for all data that libcurl passes on
     * while it has read no more than that. kernel_ns 0: none. */
    int64_t user_ns, kernel_ns, received;
};

/* The head that is being received. */
struct head {
    bool has_status, ended, final; /* final: not a 1xx answer's */
    bool http_1_0, chunked, has_length;
    bool secret;     /* the last field is not stored */
    int64_t length;  /* Content-Length */
    size_t all_size; /* of all heads and trailers of the answer */
};

/* A request in flight. The fields that each read uses are first: with hundreds in flight they are rarely in the cache. */
struct transfer {
    struct client *client;
    uint64_t last_action;               /* of its last read */
    size_t last_read, first_event;      /* row of that read, and the first event row since */
    size_t read_events;                 /* data events that this read completed */
    size_t answer_bytes, answer_events; /* of the body, and of its frames, so far */
    int64_t last_read_ns;
    uint32_t index;
    int fd;                          /* -1: not connected yet */
    int shared_fd;                   /* if `fd` is -1: the socket of the connection that it shares; -1: unknown */
    const char *last_bytes;          /* position of the last read's latest part in libcurl's buffer */
    int64_t read_ns, read_kernel_ns; /* stamps of the last read */
    bool began, body_began, event_stream;
    uint8_t cause;     /* why it is being ended */
    const char *fault; /* what is wrong with its answer; NULL: nothing */
    struct sse framer;

    CURL *easy;
    struct curl_slist *lines;
    const struct plan_request *plan;
    const struct request *request;
    struct transfer *previous, *next;
    int64_t started_ns, sent_ns; /* sent_ns: the last time that libcurl began to send it */
    int socket_errno;
    struct head head;
    struct vector header, body; /* of the answer */
    char error[CURL_ERROR_SIZE];
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

/* Check and store a line of a head. Trailers are checked and not stored: they cannot replace a field of the head. Returns false if the
 * answer ends here; the transfer's cause or fault has the reason. */
bool answer_line(struct transfer *t, const char *line, size_t size);
void answer_begin_body(struct transfer *t, int status, const char *type);

/* Return false if the answer cannot be stored; the transfer's cause has the reason. */
bool answer_body(struct transfer *t, const void *bytes, size_t size);
void answer_end(struct transfer *t);

/* ---- transfer.c */

/* Make a request's state. Returns NULL if memory is exhausted. */
struct transfer *transfer_new(struct client *c, uint32_t index);

/* End a request: frame the rest of its body, fill in its row, release its handle. */
void transfer_finish(struct transfer *t, CURLcode code, uint8_t cause);

/* ---- receive.c */

/* Set libcurl's callbacks. */
CURLcode receive_set(struct transfer *t);

/* libcurl has ended the transfer. */
void receive_done(struct transfer *t, CURLcode code);

/* ---- handle.c */

/* Begin to send the request. Returns false if memory is exhausted; the request may have ended when it returns. */
bool handle_begin(struct transfer *t);

/* curl_easy_setopt whose failure is returned and described in the transfer's error text. */
#define handle_set(t, option, value) handle_explain(t, #option, curl_easy_setopt((t)->easy, option, value))
CURLcode handle_explain(struct transfer *t, const char *option, CURLcode code);

/* Store the phases of the connection and the status in the request's row, and release the handle. */
void handle_leave(struct transfer *t, struct request_row *row);

/* ---- multi.c */

bool multi_open(struct client *c);

/* Let libcurl handle its timer, or the events of a socket. */
void multi_timer(struct client *c);
void multi_ready(struct client *c, int fd, uint32_t events);

/* End the idle connections on which bytes have arrived: they would be taken for the next answer. */
void multi_drop_stale(struct client *c);

#endif
