/* annie_quant._stream: the Python binding. It converts a plan to C and the results to Python; the loop is in client.c.
 *
 * It does not need NumPy: a result is a Block, memory with the buffer protocol, which NumPy reads without a copy. */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include "clock.h"
#include "plan.h"
#include "sse.h"

#include <curl/curl.h>
#include <pthread.h>

static void release(PyObject **object)
{
    Py_XDECREF(*object);
}

/* A reference that is given back where its scope ends. */
#define OWNED __attribute__((cleanup(release))) PyObject

struct state {
    PyTypeObject *block;
};

static struct state *state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

/* ---- Block: bytes that C allocated, read through the buffer protocol */

struct block {
    PyObject_HEAD
    struct vector bytes;
};

static void block_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    vector_free(&((struct block *)self)->bytes);
    type->tp_free(self);
    Py_DECREF(type);
}

static int block_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
    static uint8_t nothing;
    struct block *b = (struct block *)self;
    void *base = b->bytes.base ? b->bytes.base : &nothing;
    return PyBuffer_FillInfo(view, self, base, (Py_ssize_t)b->bytes.size, 0, flags);
}

static Py_ssize_t block_length(PyObject *self)
{
    return (Py_ssize_t)((struct block *)self)->bytes.size;
}

static PyType_Slot block_slots[] = {
    {Py_tp_doc, "Memory of a run, read in place through the buffer protocol."},
    {Py_tp_dealloc, block_dealloc},
    {Py_bf_getbuffer, block_getbuffer},
    {Py_sq_length, block_length},
    {0, NULL},
};

static PyType_Spec block_spec = {
    .name = "annie_quant._stream.Block",
    .basicsize = sizeof(struct block),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = block_slots,
};

/* Take ownership of the vector's memory. */
static PyObject *block_new(struct state *state, struct vector *bytes)
{
    struct block *b = (struct block *)state->block->tp_alloc(state->block, 0);
    if (!b)
        return NULL;
    b->bytes = *bytes;
    memset(bytes, 0, sizeof *bytes);
    return (PyObject *)b;
}

/* ---- run */

struct caller {
    PyThreadState *thread;
    PyObject *type, *value, *trace; /* the exception that a signal handler raised */
};

/* Let Python's signal handlers run, as between two lines of Python. */
static bool interrupted(void *context)
{
    struct caller *caller = context;
    PyEval_RestoreThread(caller->thread);
    bool raised = PyErr_CheckSignals() != 0;
    if (raised)
        PyErr_Fetch(&caller->type, &caller->value, &caller->trace);
    caller->thread = PyEval_SaveThread();
    return raised;
}

static void requests_free(struct plan_request *requests, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; requests && i < count; i++)
        request_free(&requests[i].request);
    PyMem_Free(requests);
}

static int read_text(PyObject *object, const char *what, struct text *text)
{
    Py_ssize_t size;
    text->at = PyUnicode_AsUTF8AndSize(object, &size);
    if (text->at) {
        text->size = (size_t)size;
        return 0;
    }
    if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s has a character that UTF-8 cannot encode (a lone surrogate)", what);
    }
    return -1;
}

static int read_fields(PyObject *pairs, struct field *fields)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *name, *value, *pair = PyTuple_GET_ITEM(pairs, i);
        if (!PyTuple_Check(pair)) {
            PyErr_SetString(PyExc_TypeError, "a header must be a tuple of name and value");
            return -1;
        }
        if (!PyArg_ParseTuple(pair, "UU:header", &name, &value))
            return -1;
        if (read_text(name, "a header's name", &fields[i].name) || read_text(value, "a header's value", &fields[i].value))
            return -1;
    }
    return 0;
}

static void set_refusal(int status, PyObject *method, PyObject *pairs, size_t at)
{
    if (status == REQUEST_NO_MEMORY)
        PyErr_NoMemory();
    else if (status == REQUEST_BAD_METHOD || status == REQUEST_CONNECT || status == REQUEST_METHOD_BODY)
        PyErr_Format(PyExc_ValueError, "method %R: %s", method, request_explain(status));
    else if (status == REQUEST_BAD_URL || status == REQUEST_BAD_SCHEME)
        PyErr_SetString(PyExc_ValueError, request_explain(status)); /* without the URL, which may have a password */
    else
        PyErr_Format(PyExc_ValueError, "header %R: %s", PyTuple_GET_ITEM(PyTuple_GET_ITEM(pairs, (Py_ssize_t)at), 0),
                     request_explain(status));
}

/* (url, method, ((name, value), ...), body or None, start_ns, timeout_ns, idle_ns); the struct points into the tuple's objects. */
static int read_request(PyObject *row, const char *user_agent, struct plan_request *q)
{
    struct request_spec spec = {.user_agent = user_agent};
    PyObject *url, *method, *pairs;
    Py_ssize_t body_size = 0;
    if (!PyTuple_Check(row)) {
        PyErr_SetString(PyExc_TypeError, "a request must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(row, "UUO!z#LLL", &url, &method, &PyTuple_Type, &pairs, &spec.body, &body_size, &q->start_ns, &q->timeout_ns,
                          &q->idle_ns))
        return -1;
    if (read_text(url, "the URL", &spec.url) || read_text(method, "the method", &spec.method))
        return -1;
    spec.body_size = (size_t)body_size;
    spec.field_count = (size_t)PyTuple_GET_SIZE(pairs);
    struct field *fields = PyMem_Calloc(spec.field_count + 1, sizeof *fields);
    if (!fields) {
        PyErr_NoMemory();
        return -1;
    }
    spec.fields = fields;
    int failed = read_fields(pairs, fields);
    if (!failed) {
        size_t at;
        int status = request_normalise(&spec, &q->request, &at);
        if (status != REQUEST_OK)
            set_refusal(status, method, pairs, at);
        failed = status != REQUEST_OK;
    }
    PyMem_Free(fields);
    return failed ? -1 : 0;
}

/* Begin the message of a ValueError with the request's position in the plan. */
static void name_request(Py_ssize_t index)
{
    OWNED *type = NULL, *value = NULL, *trace = NULL;
    if (!PyErr_ExceptionMatches(PyExc_ValueError))
        return;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_Format(PyExc_ValueError, "request %zd: %S", index, value ? value : Py_None);
}

static struct plan_request *read_requests(PyObject *rows, const char *user_agent)
{
    Py_ssize_t count = PyTuple_GET_SIZE(rows);
    struct plan_request *requests = PyMem_Calloc((size_t)count + 1, sizeof *requests);
    if (!requests) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_request(PyTuple_GET_ITEM(rows, i), user_agent, &requests[i])) {
            name_request(i);
            requests_free(requests, count);
            return NULL;
        }
    }
    return requests;
}

PyDoc_STRVAR(check_doc, "check(requests) -> None\n\n"
                        "Raise ValueError if one of run's requests is not valid.");

static PyObject *check(PyObject *module, PyObject *rows)
{
    (void)module;
    if (!PyTuple_Check(rows)) {
        PyErr_SetString(PyExc_TypeError, "requests must be a tuple");
        return NULL;
    }
    struct plan_request *requests = read_requests(rows, NULL);
    if (!requests)
        return NULL;
    requests_free(requests, PyTuple_GET_SIZE(rows));
    Py_RETURN_NONE;
}

static PyObject *pack_result(struct state *state, struct plan_result *result, struct caller *caller)
{
    struct vector *parts[] = {&result->requests, &result->events, &result->reads, &result->frames, &result->notes};
    enum { PARTS = sizeof parts / sizeof *parts };
    PyObject *raised = caller->value ? caller->value : Py_None;
    PyObject *tuple = PyTuple_New(PARTS + 5);
    if (!tuple)
        return NULL;
    for (int i = 0; i < PARTS; i++)
        PyTuple_SET_ITEM(tuple, i, block_new(state, parts[i]));
    PyTuple_SET_ITEM(tuple, PARTS, PyLong_FromLongLong(result->origin_ns));
    PyTuple_SET_ITEM(tuple, PARTS + 1, PyLong_FromLongLong(result->origin_realtime_ns));
    PyTuple_SET_ITEM(tuple, PARTS + 2, PyBool_FromLong(result->stopped));
    PyTuple_SET_ITEM(tuple, PARTS + 3, PyBool_FromLong(result->realtime));
    PyTuple_SET_ITEM(tuple, PARTS + 4, Py_NewRef(raised));
    for (int i = 0; i < PARTS + 5; i++) {
        if (!PyTuple_GET_ITEM(tuple, i)) {
            Py_DECREF(tuple);
            return NULL;
        }
    }
    return tuple;
}

static PyObject *explain(int status)
{
    if (status == PLAN_NO_MEMORY)
        return PyErr_NoMemory();
    if (status == PLAN_NO_EPOLL)
        return PyErr_SetFromErrno(PyExc_OSError);
    PyErr_SetString(PyExc_RuntimeError, "libcurl gave no multi handle");
    return NULL;
}

PyDoc_STRVAR(run_doc,
             "run(requests, *, concurrency, deadline_ns, max_event_bytes, max_answer_bytes, max_answer_events,\n"
             "    cancel_fd, signal_fd, forward_fd, http, fresh_connections, kernel_stamps, realtime, verify_tls, unix_socket, proxy,\n"
             "    ca_file, user_agent)\n"
             "    -> (requests, events, reads, frames, notes, origin_ns, origin_realtime_ns, stopped, realtime,\n"
             "        raised)\n\n"
             "requests: tuple of (url, method, ((name, value), ...), body or None, start_ns, timeout_ns, idle_ns).\n"
             "The GIL is released from start to end. The first five results are Blocks; see annie_quant.stream.");

/* A path as os.fsencode gives it, or None. */
static int read_path(PyObject *object, void *path)
{
    char *bytes;
    if (object == Py_None)
        return 1;
    if (PyBytes_AsStringAndSize(object, &bytes, NULL)) /* also refuses a NUL */
        return 0;
    *(const char **)path = bytes;
    return 1;
}

static PyObject *run(PyObject *module, PyObject *args, PyObject *named)
{
    static char *names[] = {"requests",
                            "concurrency",
                            "deadline_ns",
                            "max_event_bytes",
                            "max_answer_bytes",
                            "max_answer_events",
                            "cancel_fd",
                            "signal_fd",
                            "forward_fd",
                            "http",
                            "fresh_connections",
                            "kernel_stamps",
                            "realtime",
                            "verify_tls",
                            "unix_socket",
                            "proxy",
                            "ca_file",
                            "user_agent",
                            NULL};
    struct plan plan = {.interrupted = interrupted};
    struct plan_result result = {.stopped = false};
    struct caller caller = {.thread = NULL};
    const char *user_agent;
    PyObject *rows, *out = NULL;
    Py_ssize_t concurrency, max_event_bytes, max_answer_bytes, max_answer_events;
    int fresh, stamps, realtime, verify;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O!$nLnnniiiippppO&zO&z", names, &PyTuple_Type, &rows, &concurrency, &plan.deadline_ns,
                                     &max_event_bytes, &max_answer_bytes, &max_answer_events, &plan.cancel_fd, &plan.signal_fd,
                                     &plan.forward_fd, &plan.http, &fresh, &stamps, &realtime, &verify, read_path, &plan.unix_socket,
                                     &plan.proxy, read_path, &plan.ca_file, &user_agent))
        return NULL;
    if (concurrency < 0 || max_event_bytes <= 0 || max_answer_bytes <= 0 || max_answer_events <= 0) {
        PyErr_SetString(PyExc_ValueError, "concurrency must be >= 0 and each max_ value > 0");
        return NULL;
    }
    if ((uint64_t)max_event_bytes > UINT32_MAX) { /* the width of an event row's size */
        PyErr_Format(PyExc_ValueError, "max_event_bytes=%zd is over %u, the largest event that can be stored", max_event_bytes, UINT32_MAX);
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(rows);
    struct plan_request *requests = read_requests(rows, user_agent);
    if (!requests)
        return NULL;
    plan.requests = requests;
    plan.count = (size_t)count;
    plan.concurrency = (size_t)concurrency;
    plan.max_event_bytes = (size_t)max_event_bytes;
    plan.max_answer_bytes = (size_t)max_answer_bytes;
    plan.max_answer_events = (size_t)max_answer_events;
    plan.fresh_connections = fresh;
    plan.kernel_stamps = stamps;
    plan.realtime = realtime;
    plan.verify_tls = verify;
    plan.context = &caller;

    caller.thread = PyEval_SaveThread();
    int status = plan_run(&plan, &result);
    PyEval_RestoreThread(caller.thread);
    if (caller.type)
        PyErr_NormalizeException(&caller.type, &caller.value, &caller.trace);

    out = status == PLAN_OK ? pack_result(state_of(module), &result, &caller) : explain(status);
    plan_result_free(&result);
    requests_free(requests, count);
    Py_XDECREF(caller.type);
    Py_XDECREF(caller.value);
    Py_XDECREF(caller.trace);
    return out;
}

/* ---- the framer and the clock map alone, for decoding elsewhere and for tests */

static int list_frame(void *context, const uint8_t *frame, size_t size, const struct sse_frame *info)
{
    OWNED *row = Py_BuildValue("(iiIIIy#)", info->kind, info->flags, info->data_lines, info->data_start, info->data_size,
                               (const char *)frame, (Py_ssize_t)size);
    return row ? PyList_Append(context, row) : -1;
}

PyDoc_STRVAR(cut_doc, "cut(reads, max_event_bytes, lines=False) -> [(kind, flags, data_lines, data_start, data_size, frame)]\n\n"
                      "The frames of a stream that was received as this tuple of bytes; lines: of newline-delimited JSON. "
                      "ValueError if one is too large.");

static PyObject *cut(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *reads;
    Py_ssize_t most;
    int lines = 0;
    if (!PyArg_ParseTuple(args, "O!n|p", &PyTuple_Type, &reads, &most, &lines))
        return NULL;
    PyObject *rows = PyList_New(0);
    if (!rows)
        return NULL;
    struct sse framer;
    sse_init(&framer, most > 0 ? (size_t)most : 1);
    framer.lines = lines;
    int status = SSE_OK;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(reads) && status == SSE_OK; i++) {
        char *bytes;
        Py_ssize_t size;
        status = PyBytes_AsStringAndSize(PyTuple_GET_ITEM(reads, i), &bytes, &size)
                     ? -1
                     : sse_feed(&framer, (const uint8_t *)bytes, (size_t)size, list_frame, rows);
    }
    if (status == SSE_OK)
        status = sse_finish(&framer, list_frame, rows);
    sse_free(&framer);
    if (status == SSE_OK)
        return rows;
    Py_DECREF(rows);
    if (status == SSE_NO_MEMORY)
        return PyErr_NoMemory();
    if (status == SSE_TOO_LARGE)
        PyErr_Format(PyExc_ValueError, "an event of over %zd bytes", most);
    return NULL;
}

PyDoc_STRVAR(map_stamp_doc, "map_stamp(offset_ns, previous_ns, realtime_ns, not_before_ns, user_ns) -> int\n\n"
                            "The monotonic time of a kernel stamp, 0 if it is unknown (clock.h).");

static PyObject *map_stamp(PyObject *module, PyObject *args)
{
    (void)module;
    struct clock_pair pair = {.measured_ns = 1};
    long long realtime, not_before, user, offset, previous;
    if (!PyArg_ParseTuple(args, "LLLLL", &offset, &previous, &realtime, &not_before, &user))
        return NULL;
    pair.offset_ns = offset;
    pair.previous_ns = previous;
    return PyLong_FromLongLong(clock_map(&pair, realtime, not_before, user));
}

/* ---- the module */

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))run, METH_VARARGS | METH_KEYWORDS, run_doc},
    {"check", check, METH_O, check_doc},
    {"cut", cut, METH_VARARGS, cut_doc},
    {"map_stamp", map_stamp, METH_VARARGS, map_stamp_doc},
    {NULL, NULL, 0, NULL},
};

#define COLUMN(row, name, format)                                                                                                          \
    {                                                                                                                                      \
#name, format, offsetof(struct row, name)                                                                                          \
    }

struct column {
    const char *name, *format;
    size_t offset;
};

static const struct column request_columns[] = {
    COLUMN(request_row, scheduled_ns, "<i8"),   COLUMN(request_row, started_ns, "<i8"),
    COLUMN(request_row, ended_ns, "<i8"),       COLUMN(request_row, ended_kernel_ns, "<i8"),
    COLUMN(request_row, first_byte_ns, "<i8"),  COLUMN(request_row, first_byte_kernel_ns, "<i8"),
    COLUMN(request_row, name_lookup_us, "<i8"), COLUMN(request_row, connect_us, "<i8"),
    COLUMN(request_row, tls_us, "<i8"),         COLUMN(request_row, pretransfer_us, "<i8"),
    COLUMN(request_row, header_offset, "<u8"),  COLUMN(request_row, error_offset, "<u8"),
    COLUMN(request_row, header_size, "<u4"),    COLUMN(request_row, error_size, "<u4"),
    COLUMN(request_row, status, "<i4"),         COLUMN(request_row, curl_code, "<i4"),
    COLUMN(request_row, os_errno, "<i4"),       COLUMN(request_row, http_version, "<i4"),
    COLUMN(request_row, resent_us, "<u4"),      COLUMN(request_row, cause, "u1"),
    COLUMN(request_row, new_connection, "?"),   COLUMN(request_row, event_stream, "?"),
    {NULL, NULL, sizeof(struct request_row)},
};

static const struct column event_columns[] = {
    COLUMN(event_row, user_ns, "<i8"), COLUMN(event_row, kernel_ns, "<i8"),  COLUMN(event_row, offset, "<u8"),
    COLUMN(event_row, size, "<u4"),    COLUMN(event_row, data_start, "<u4"), COLUMN(event_row, data_size, "<u4"),
    COLUMN(event_row, request, "<u4"), COLUMN(event_row, read, "<u4"),       COLUMN(event_row, data_lines, "<u2"),
    COLUMN(event_row, kind, "u1"),     COLUMN(event_row, flags, "u1"),       {NULL, NULL, sizeof(struct event_row)},
};

static const struct column read_columns[] = {
    COLUMN(read_row, user_ns, "<i8"),
    COLUMN(read_row, request, "<u4"),
    COLUMN(read_row, size, "<u4"),
    {NULL, NULL, sizeof(struct read_row)},
};

/* {"names", "formats", "offsets", "itemsize"} for numpy.dtype, so that the layout of rows is defined in one place. */
static int add_layout(PyObject *module, const char *name, const struct column *columns)
{
    OWNED *names = PyList_New(0), *formats = PyList_New(0), *offsets = PyList_New(0);
    if (!names || !formats || !offsets)
        return -1;
    const struct column *f = columns;
    for (; f->name; f++) {
        OWNED *n = PyUnicode_FromString(f->name), *t = PyUnicode_FromString(f->format), *o = PyLong_FromSize_t(f->offset);
        if (!n || !t || !o || PyList_Append(names, n) || PyList_Append(formats, t) || PyList_Append(offsets, o))
            return -1;
    }
    OWNED *layout = Py_BuildValue("{sOsOsOsn}", "names", names, "formats", formats, "offsets", offsets, "itemsize", (Py_ssize_t)f->offset);
    return layout ? PyModule_AddObjectRef(module, name, layout) : -1;
}

/* Once per process: interpreters with their own GIL may import the module at the same time. It is not undone, because another library of
 * the process may use libcurl. */
static pthread_once_t curl_once = PTHREAD_ONCE_INIT;
static CURLcode curl_status;

static void start_curl(void)
{
    curl_status = curl_global_init(CURL_GLOBAL_DEFAULT);
}

static int module_exec(PyObject *module)
{
    struct state *state = state_of(module);
    if (pthread_once(&curl_once, start_curl) || curl_status != CURLE_OK) {
        PyErr_SetString(PyExc_ImportError, "libcurl cannot be initialised");
        return -1;
    }
    state->block = (PyTypeObject *)PyType_FromModuleAndSpec(module, &block_spec, NULL);
    if (!state->block || PyModule_AddType(module, state->block))
        return -1;
    if (add_layout(module, "REQUEST_ROW", request_columns) || add_layout(module, "EVENT_ROW", event_columns) ||
        add_layout(module, "READ_ROW", read_columns))
        return -1;
    return PyModule_AddStringConstant(module, "CURL_VERSION", curl_version());
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct state *state = state_of(module);
    Py_VISIT(state->block);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct state *state = state_of(module);
    Py_CLEAR(state->block);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030c0000
    /* No object is shared: the state is per module, a Block's memory is malloc's, and a run belongs to its thread. */
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030d0000
    /* A run owns all that it writes, a Block never changes, and the state is written once, above. */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,          .m_name = "_stream",     .m_doc = "Streaming HTTP timing client; use annie_quant.stream.",
    .m_size = sizeof(struct state), .m_methods = methods,    .m_slots = slots,
    .m_traverse = module_traverse,  .m_clear = module_clear, .m_free = module_free,
};

PyMODINIT_FUNC PyInit__stream(void)
{
    return PyModuleDef_Init(&definition);
}
