/* The input of a run, and the rows of its result. Times are CLOCK_MONOTONIC nanoseconds unless the name states another unit. */
#ifndef AQ_STREAM_PLAN_H
#define AQ_STREAM_PLAN_H

#include "request.h"
#include "vector.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One request, and when it runs. */
struct plan_request {
    struct request request; /* owned by the caller */
    int64_t start_ns;       /* after the run's start; -1: as soon as the concurrency allows */
    int64_t timeout_ns;     /* from its start to its end */
    int64_t idle_ns;        /* between two reads, and from the start to the first read */
};

enum plan_http { PLAN_HTTP_1_1 = 0, PLAN_HTTP_2 = 1, PLAN_HTTP_2_PRIOR = 2 };

struct plan {
    const struct plan_request *requests;
    size_t count;
    size_t concurrency;       /* 0: unlimited */
    int64_t deadline_ns;      /* after the run's start; 0: none */
    size_t max_event_bytes;   /* at most 2^32 - 1 */
    size_t max_answer_bytes;  /* of one answer's body */
    size_t max_answer_events; /* frames of one answer, comments and pings included */
    int cancel_fd;            /* the run stops when it is readable; it is not read, so that several runs can have the same; -1: none */
    int signal_fd;            /* not blocking; its bytes are read, and `interrupted` is called; -1: none */
    int forward_fd;           /* receives these bytes; -1: none */
    int http;                 /* a plan_http */
    bool fresh_connections;
    bool kernel_stamps;
    bool realtime; /* request SCHED_FIFO */
    bool verify_tls;
    const char *unix_socket, *proxy, *ca_file; /* NULL: none */
    /* Called when signal_fd is readable and when a signal ended a wait; true stops the run. */
    bool (*interrupted)(void *context);
    void *context;
};

enum plan_cause {
    CAUSE_NONE = 0,        /* the answer is complete */
    CAUSE_TRANSPORT = 1,   /* libcurl's error: `curl_code`, `os_errno` */
    CAUSE_TIMEOUT = 2,     /* timeout_ns */
    CAUSE_IDLE = 3,        /* no bytes for idle_ns */
    CAUSE_DEADLINE = 4,    /* the run's deadline */
    CAUSE_CANCELLED = 5,   /* the run was stopped */
    CAUSE_EVENT_SIZE = 6,  /* one event over max_event_bytes */
    CAUSE_NOT_STARTED = 7, /* stopped before its start */
    CAUSE_ANSWER_SIZE = 8, /* one answer over max_answer_bytes or max_answer_events */
    CAUSE_HEAD_SIZE = 9,   /* heads and trailers of one answer over ANSWER_HEAD_BYTES (answer.c) */
};

/* One row per request, in the order of the plan. */
struct request_row {
    int64_t scheduled_ns; /* intended start; 0 in a closed loop */
    int64_t started_ns;   /* when it was passed to the connection */
    int64_t ended_ns, ended_kernel_ns;
    int64_t first_byte_ns, first_byte_kernel_ns;
    int64_t name_lookup_us, connect_us, tls_us, pretransfer_us; /* CURLINFO_*_TIME_T */
    uint64_t header_offset, error_offset;                       /* in the notes */
    uint32_t header_size, error_size;
    int32_t status;              /* 0: no status line was received */
    int32_t curl_code, os_errno; /* 0 if the request did not fail */
    int32_t http_version;        /* CURL_HTTP_VERSION_* */
    uint32_t resent_us;          /* from the start until it was sent again, because a reused connection had ended; 0: it was sent once */
    uint8_t cause;               /* a plan_cause */
    uint8_t new_connection;
    uint8_t event_stream; /* the body was read as events */
    uint8_t pad;
};

/* One row per frame, in order of arrival; a request's frames in order are its body. */
struct event_row {
    int64_t user_ns;   /* when this process was notified of it; it may have been read or delivered later */
    int64_t kernel_ns; /* 0: unknown */
    uint64_t offset;   /* in the frames */
    uint32_t size;
    uint32_t data_start, data_size; /* the first data line's value, from the frame's start */
    uint32_t request;
    uint32_t read; /* the read that completed it */
    uint16_t data_lines;
    uint8_t kind;  /* an sse_kind */
    uint8_t flags; /* sse_flags */
};

/* One row per network read of body bytes; parts with the same stamps are one row. The kernel's stamp is in the rows of the events that the
 * read completed. */
struct read_row {
    int64_t user_ns;
    uint32_t request;
    uint32_t size;
};

static_assert(sizeof(struct request_row) == 128, "the row has no hidden padding");
static_assert(sizeof(struct event_row) == 48, "the row has no hidden padding");
static_assert(sizeof(struct read_row) == 16, "the row has no hidden padding");

struct plan_result {
    struct vector requests, events, reads;
    struct vector frames; /* raw bytes of the frames, one after the other */
    struct vector notes;  /* response headers and error texts */
    int64_t origin_ns;    /* start of the run */
    int64_t origin_realtime_ns;
    bool stopped;  /* by `interrupted` */
    bool realtime; /* the loop had SCHED_FIFO */
};

enum plan_status { PLAN_OK = 0, PLAN_NO_MEMORY = 1, PLAN_NO_EPOLL = 2, PLAN_NO_CURL = 3 };

/* Run the plan to its end. The result is valid for PLAN_OK and must be freed in any case. */
int plan_run(const struct plan *plan, struct plan_result *result);
void plan_result_free(struct plan_result *result);

#endif
