/* _gemm: the Python binding of the NVFP4 GEMM kernels. Pointers and sizes are integers that annie_quant/gemm has checked.
 * They are passed on, and a CUDA status becomes an exception. The driver is not used until a function is called. */
#include <Python.h>

#include <limits.h>
#include <string.h>

#include "gemm/runtime.h"
#include "gemm/gemm.h"

typedef struct {
    PyObject *error; /* _gemm.CudaError(message, status) */
} module_state;

static module_state *state_of(PyObject *module) { return (module_state *)PyModule_GetState(module); }

static PyObject *raise_status(PyObject *module, int status) {
    PyObject *args = Py_BuildValue("(si)", aq_error_text(status), status);
    if (args) {
        PyErr_SetObject(state_of(module)->error, args);
        Py_DECREF(args);
    }
    return NULL;
}

/* Run one call without the GIL; the value of `expr` is its status. */
#define CALL(status, expr)                                                                                                                 \
    do {                                                                                                                                   \
        Py_BEGIN_ALLOW_THREADS(status)                                                                                                     \
        = (expr);                                                                                                                          \
        Py_END_ALLOW_THREADS                                                                                                               \
    } while (0)

static PyObject *done(PyObject *module, int status) {
    if (status) return raise_status(module, status);
    Py_RETURN_NONE;
}

static void *ptr(unsigned long long v) { return (void *)(uintptr_t)v; }

static PyObject *py_device_count(PyObject *module, PyObject *unused) {
    int count = 0, status;
    (void)unused;
    CALL(status, aq_device_count(&count));
    return status ? raise_status(module, status) : PyLong_FromLong(count);
}

static PyObject *py_device_info(PyObject *module, PyObject *args) {
    int device, status;
    aq_device d;
    if (!PyArg_ParseTuple(args, "i:device_info", &device)) return NULL;
    CALL(status, aq_device_info(device, &d));
    if (status) return raise_status(module, status);
    return Py_BuildValue("{s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K}", "name", d.name, "major", d.major, "minor", d.minor, "sms", d.sms,
                         "clock_khz", d.clock_khz, "shared_memory_bytes", d.smem_block, "l2_bytes", d.l2_bytes, "driver", d.driver,
                         "runtime", d.runtime, "memory_bytes", (unsigned long long)d.memory_bytes);
}

static PyObject *py_pointer_device(PyObject *module, PyObject *args) {
    unsigned long long p;
    int device = -1, status;
    if (!PyArg_ParseTuple(args, "K:pointer_device", &p)) return NULL;
    CALL(status, aq_pointer_device(ptr(p), &device));
    return status ? raise_status(module, status) : PyLong_FromLong(device);
}

static PyObject *py_use_device(PyObject *module, PyObject *args) {
    int device, before = -1, status;
    if (!PyArg_ParseTuple(args, "i:use_device", &device)) return NULL;
    CALL(status, aq_use_device(device, &before));
    return status ? raise_status(module, status) : PyLong_FromLong(before);
}

static PyObject *py_packed_bytes(PyObject *module, PyObject *args) {
    long long n, k;
    (void)module;
    if (!PyArg_ParseTuple(args, "LL:packed_bytes", &n, &k)) return NULL;
    return PyLong_FromSize_t(aq_packed_bytes(n, k));
}

/* The report of an operation as a Python object: None, or (number of bad values, smallest index). */
static PyObject *report_or_none(PyObject *module, int status, const aq_report *report) {
    if (status) return raise_status(module, status);
    if (!report->count) Py_RETURN_NONE;
    return Py_BuildValue("(LL)", (long long)report->count, (long long)report->first);
}

static PyObject *py_repack(PyObject *module, PyObject *args) {
    unsigned long long codes, scales, packed, stream;
    long long n, k;
    int fault, status;
    aq_report report;
    if (!PyArg_ParseTuple(args, "KKKLLiK:repack", &codes, &scales, &packed, &n, &k, &fault, &stream)) return NULL;
    CALL(status, aq_repack(ptr(codes), ptr(scales), ptr(packed), n, k, fault, &report, ptr(stream)));
    return report_or_none(module, status, &report);
}

/* limits: None for those of the current device, or (sms, smem_bytes, major, wgmma, native_fp4). */
static int parse_limits(PyObject *module, PyObject *limits, aq_limits *out) {
    if (limits != Py_None && !PyTuple_Check(limits)) {
        PyErr_Format(PyExc_TypeError, "limits is a %s, expected None or a tuple of five (_gemm.limits)", Py_TYPE(limits)->tp_name);
        return 0;
    }
    if (limits != Py_None)
        return PyArg_ParseTuple(limits, "iiipp;limits must be (sms, smem_bytes, major, wgmma, native_fp4)", &out->sms, &out->smem_bytes,
                                &out->major, &out->wgmma, &out->native_fp4);
    int status;
    CALL(status, aq_current_limits(out));
    if (status) raise_status(module, status);
    return status == 0;
}

static PyObject *py_limits(PyObject *module, PyObject *unused) {
    aq_limits l;
    (void)unused;
    if (!parse_limits(module, Py_None, &l)) return NULL;
    return Py_BuildValue("(iiiNN)", l.sms, l.smem_bytes, l.major, PyBool_FromLong(l.wgmma), PyBool_FromLong(l.native_fp4));
}

/* Return the number of a path, and 0 for "auto" where that is accepted; -1 with ValueError for another name. */
static int path_number(const char *name, int auto_accepted) {
    if (auto_accepted && strcmp(name, "auto") == 0) return AQ_PATH_AUTO;
    for (int number = 1; aq_path_of(number); number++)
        if (strcmp(name, aq_path_of(number)->name) == 0) return number;
    PyErr_Format(PyExc_ValueError, "there is no path %s", name);
    return -1;
}

static PyObject *plan_to_tuple(const aq_plan *p) {
    const int count = aq_path_of(p->path)->field_count;
    PyObject *fields = PyTuple_New(count);
    for (int i = 0; fields && i < count; i++) {
        PyObject *field = PyLong_FromLong(p->fields[i]);
        if (field) PyTuple_SET_ITEM(fields, i, field);
        else Py_CLEAR(fields);
    }
    return fields;
}

static int plan_from_tuple(const char *name, PyObject *fields, aq_plan *p) {
    const int number = path_number(name, 0);
    if (number < 0) return 0;
    const int count = aq_path_of(number)->field_count;
    if (PyTuple_GET_SIZE(fields) != count) {
        PyErr_Format(PyExc_TypeError, "a plan of path %s has %d fields, got %zd", name, count, PyTuple_GET_SIZE(fields));
        return 0;
    }
    p->path = number;
    for (int i = 0; i < count; i++) {
        const long field = PyLong_AsLong(PyTuple_GET_ITEM(fields, i));
        if (field == -1 && PyErr_Occurred()) return 0;
        p->fields[i] = field < INT_MIN || field > INT_MAX ? -1 : (int)field; /* -1 is refused by the check of the plan */
    }
    return 1;
}

static PyObject *py_plan(PyObject *module, PyObject *args) {
    long long m, n, k;
    const char *path;
    int number, status;
    PyObject *of = Py_None;
    aq_limits limits;
    aq_plan p;
    if (!PyArg_ParseTuple(args, "LLLs|O:plan", &m, &n, &k, &path, &of) || (number = path_number(path, 1)) < 0 ||
        !parse_limits(module, of, &limits))
        return NULL;
    CALL(status, aq_plan_w4a16(m, n, k, number, &limits, &p));
    if (status) return raise_status(module, status);
    return Py_BuildValue("(sN)", aq_path_of(p.path)->name, plan_to_tuple(&p));
}

static PyObject *py_plan_needs(PyObject *module, PyObject *args) {
    long long m, n, k;
    const char *path;
    PyObject *fields, *of = Py_None;
    aq_limits limits;
    aq_plan p;
    aq_needs needs;
    if (!PyArg_ParseTuple(args, "LLLsO!|O:plan_needs", &m, &n, &k, &path, &PyTuple_Type, &fields, &of) ||
        !plan_from_tuple(path, fields, &p))
        return NULL;
    if (!parse_limits(module, of, &limits)) return NULL;
    const char *problem = aq_plan_problem(m, n, k, &limits, &p, &needs);
    if (problem) return PyErr_Format(PyExc_ValueError, "%s", problem);
    return Py_BuildValue("(iL)", needs.smem_bytes, (long long)needs.workspace_bytes);
}

static PyObject *py_w4a16(PyObject *module, PyObject *args) {
    unsigned long long x, packed, out, workspace, stream;
    long long ldx, m, n, k, workspace_bytes;
    float scale;
    int x_type, out_type, pdl, status;
    const char *path;
    PyObject *fields;
    aq_plan p;
    if (!PyArg_ParseTuple(args, "KLKfKKLLLLiisO!iK:w4a16", &x, &ldx, &packed, &scale, &out, &workspace, &workspace_bytes, &m, &n, &k,
                          &x_type, &out_type, &path, &PyTuple_Type, &fields, &pdl, &stream) ||
        !plan_from_tuple(path, fields, &p))
        return NULL;
    CALL(status, aq_w4a16(ptr(x), ldx, ptr(packed), scale, ptr(out), ptr(workspace), workspace_bytes, m, n, k, x_type, out_type, &p, pdl,
                          ptr(stream)));
    return done(module, status);
}

static PyObject *py_linear_workspace(PyObject *module, PyObject *args) {
    long long m, n, k;
    int64_t bytes = 0;
    if (!PyArg_ParseTuple(args, "LLL:linear_workspace", &m, &n, &k)) return NULL;
    const int status = aq_linear_workspace(m, n, k, &bytes); /* a look-up: shorter than releasing the GIL */
    return status ? raise_status(module, status) : PyLong_FromLongLong((long long)bytes);
}

static PyObject *py_linear(PyObject *module, PyObject *args) {
    unsigned long long x, packed, out, workspace, stream;
    long long ldx, packed_bytes, workspace_bytes, m, n, k;
    float scale;
    int type, status;
    if (!PyArg_ParseTuple(args, "KLKLfKKLLLLiK:linear", &x, &ldx, &packed, &packed_bytes, &scale, &out, &workspace, &workspace_bytes, &m,
                          &n, &k, &type, &stream))
        return NULL;
    CALL(status,
         aq_linear(ptr(x), ldx, ptr(packed), packed_bytes, scale, ptr(out), ptr(workspace), workspace_bytes, m, n, k, type, ptr(stream)));
    return done(module, status);
}

static int parse_grouped_shape(PyObject *of, aq_grouped_shape *shape) {
    long long v[5];
    if (!PyArg_ParseTuple(of, "LLLLL;shape must be (pairs, experts, top_k, n, k)", &v[0], &v[1], &v[2], &v[3], &v[4])) return 0;
    *shape = (aq_grouped_shape){v[0], v[1], v[2], v[3], v[4]};
    return 1;
}

static int parse_grouped_plan(PyObject *of, aq_grouped_plan *p) {
    return PyArg_ParseTuple(of, "iiii;fields must be four numbers", &p->tile_tokens, &p->cluster_size, &p->stages, &p->step_tiles);
}

static PyObject *py_plan_grouped(PyObject *module, PyObject *args) {
    PyObject *of_shape, *of = Py_None;
    aq_grouped_shape shape;
    aq_limits limits;
    aq_grouped_plan p;
    int tile_tokens, status;
    if (!PyArg_ParseTuple(args, "O!i|O:plan_grouped", &PyTuple_Type, &of_shape, &tile_tokens, &of) ||
        !parse_grouped_shape(of_shape, &shape) || !parse_limits(module, of, &limits))
        return NULL;
    CALL(status, aq_plan_grouped(&shape, tile_tokens, &limits, &p));
    return status ? raise_status(module, status) : Py_BuildValue("(iiii)", p.tile_tokens, p.cluster_size, p.stages, p.step_tiles);
}

static PyObject *py_grouped_needs(PyObject *module, PyObject *args) {
    PyObject *of_shape, *fields, *of = Py_None;
    aq_grouped_shape shape;
    aq_limits limits;
    aq_grouped_plan p;
    aq_needs needs;
    if (!PyArg_ParseTuple(args, "O!O!|O:grouped_needs", &PyTuple_Type, &of_shape, &PyTuple_Type, &fields, &of) ||
        !parse_grouped_shape(of_shape, &shape) || !parse_grouped_plan(fields, &p) || !parse_limits(module, of, &limits))
        return NULL;
    const char *problem = aq_grouped_problem(&shape, &limits, &p, &needs);
    if (problem) return PyErr_Format(PyExc_ValueError, "%s", problem);
    return Py_BuildValue("(iL)", needs.smem_bytes, (long long)aq_grouped_tiles(&shape, p.tile_tokens));
}

static PyObject *py_grouped(PyObject *module, PyObject *args) {
    unsigned long long x, packed, scales, sorted_pairs, tile_experts, padded, out, stream;
    long long ldx, packed_bytes, tiles;
    int type, pdl, status;
    PyObject *of_shape, *fields;
    aq_grouped_shape shape;
    aq_grouped_plan p;
    if (!PyArg_ParseTuple(args, "KLKLKKKKLKO!iO!iK:grouped", &x, &ldx, &packed, &packed_bytes, &scales, &sorted_pairs, &tile_experts,
                          &padded, &tiles, &out, &PyTuple_Type, &of_shape, &type, &PyTuple_Type, &fields, &pdl, &stream) ||
        !parse_grouped_shape(of_shape, &shape) || !parse_grouped_plan(fields, &p))
        return NULL;
    CALL(status, aq_grouped(ptr(x), ldx, ptr(packed), packed_bytes, ptr(scales), ptr(sorted_pairs), ptr(tile_experts), ptr(padded), tiles,
                            ptr(out), &shape, type, &p, pdl, ptr(stream)));
    return done(module, status);
}

static PyObject *py_w4a4(PyObject *module, PyObject *args) {
    unsigned long long a, sa, w, sw, out, stream;
    long long m, n, k;
    float alpha;
    int out_type, mode, fault, status;
    if (!PyArg_ParseTuple(args, "KKKKfKLLLiiiK:w4a4", &a, &sa, &w, &sw, &alpha, &out, &m, &n, &k, &out_type, &mode, &fault, &stream))
        return NULL;
    CALL(status, aq_w4a4(ptr(a), ptr(sa), ptr(w), ptr(sw), alpha, ptr(out), m, n, k, out_type, mode, fault, ptr(stream)));
    return done(module, status);
}

static PyObject *py_fake_quant(PyObject *module, PyObject *args) {
    unsigned long long x, out, stream;
    long long blocks;
    float scale;
    int type, status;
    if (!PyArg_ParseTuple(args, "KiLfKK:fake_quant", &x, &type, &blocks, &scale, &out, &stream)) return NULL;
    CALL(status, aq_fake_quant(ptr(x), type, blocks, scale, ptr(out), ptr(stream)));
    return done(module, status);
}

static PyObject *py_malloc(PyObject *module, PyObject *args) {
    long long bytes;
    void *p = NULL;
    int status;
    if (!PyArg_ParseTuple(args, "L:malloc", &bytes)) return NULL;
    CALL(status, aq_malloc(bytes, &p));
    return status ? raise_status(module, status) : PyLong_FromVoidPtr(p);
}

static PyObject *py_copy(PyObject *module, PyObject *args) {
    unsigned long long to, from, stream;
    long long bytes;
    int status;
    if (!PyArg_ParseTuple(args, "KKLK:copy", &to, &from, &bytes, &stream)) return NULL;
    CALL(status, aq_copy(ptr(to), ptr(from), bytes, ptr(stream)));
    return done(module, status);
}

static PyObject *py_fill(PyObject *module, PyObject *args) {
    unsigned long long to, stream;
    long long bytes;
    int value, status;
    if (!PyArg_ParseTuple(args, "KiLK:fill", &to, &value, &bytes, &stream)) return NULL;
    CALL(status, aq_fill(ptr(to), value, bytes, ptr(stream)));
    return done(module, status);
}

static PyObject *py_stream_new(PyObject *module, PyObject *unused) {
    void *stream = NULL;
    int status;
    (void)unused;
    CALL(status, aq_stream_new(&stream));
    return status ? raise_status(module, status) : PyLong_FromVoidPtr(stream);
}

/* Calls that take one handle and return nothing. */
static PyObject *handle_call(PyObject *module, PyObject *args, int (*call)(void *)) {
    unsigned long long handle;
    int status;
    if (!PyArg_ParseTuple(args, "K:stream_new", &handle)) return NULL;
    CALL(status, call(ptr(handle)));
    return done(module, status);
}
static PyObject *py_free(PyObject *module, PyObject *args) { return handle_call(module, args, aq_free); }
static PyObject *py_stream_free(PyObject *module, PyObject *args) { return handle_call(module, args, aq_stream_free); }
static PyObject *py_stream_sync(PyObject *module, PyObject *args) { return handle_call(module, args, aq_stream_sync); }
static PyObject *py_capture_begin(PyObject *module, PyObject *args) { return handle_call(module, args, aq_capture_begin); }
static PyObject *py_graph_free(PyObject *module, PyObject *args) { return handle_call(module, args, aq_graph_free); }

static PyObject *py_stream_after(PyObject *module, PyObject *args) {
    unsigned long long stream, earlier;
    int status;
    if (!PyArg_ParseTuple(args, "KK:stream_after", &stream, &earlier)) return NULL;
    CALL(status, aq_stream_after(ptr(stream), ptr(earlier)));
    return done(module, status);
}

static PyObject *py_capture_end(PyObject *module, PyObject *args) {
    unsigned long long stream;
    void *exec = NULL;
    int status;
    if (!PyArg_ParseTuple(args, "K:capture_end", &stream)) return NULL;
    CALL(status, aq_capture_end(ptr(stream), &exec));
    return status ? raise_status(module, status) : PyLong_FromVoidPtr(exec);
}

static PyObject *py_graph_time(PyObject *module, PyObject *args) {
    unsigned long long exec, stream;
    float ms = 0;
    int status;
    if (!PyArg_ParseTuple(args, "KK:graph_time", &exec, &stream)) return NULL;
    CALL(status, aq_graph_time(ptr(exec), ptr(stream), &ms));
    return status ? raise_status(module, status) : PyFloat_FromDouble(ms);
}

static PyMethodDef methods[] = {
    {"device_count", py_device_count, METH_NOARGS, "device_count() -> number of CUDA devices"},
    {"device_info", py_device_info, METH_VARARGS, "device_info(device) -> dict"},
    {"pointer_device", py_pointer_device, METH_VARARGS, "pointer_device(ptr) -> device, or -1 for host memory"},
    {"use_device", py_use_device, METH_VARARGS, "use_device(device) -> the previous device"},
    {"packed_bytes", py_packed_bytes, METH_VARARGS, "packed_bytes(n, k) -> bytes of the repacked weight"},
    {"repack", py_repack, METH_VARARGS,
     "repack(codes, scales, packed, n, k, fault, stream) -> None, or (count, first index) of NaN and negative scales"},
    {"limits", py_limits, METH_NOARGS, "limits() -> (sms, smem_bytes, major, wgmma, native_fp4) of the current device"},
    {"plan", py_plan, METH_VARARGS, "plan(m, n, k, path, limits=None) -> (path, fields)"},
    {"plan_needs", py_plan_needs, METH_VARARGS,
     "plan_needs(m, n, k, path, fields, limits=None) -> (shared memory per block, workspace); ValueError: what is wrong with the plan"},
    {"w4a16", py_w4a16, METH_VARARGS,
     "w4a16(x, ldx, packed, scale, out, workspace or 0, workspace_bytes, m, n, k, x_type, out_type, path, fields, pdl, stream)"},
    {"linear_workspace", py_linear_workspace, METH_VARARGS, "linear_workspace(m, n, k) -> bytes"},
    {"linear", py_linear, METH_VARARGS,
     "linear(x, ldx, packed, packed_bytes, scale, out, workspace or 0, workspace_bytes, m, n, k, type, stream)"},
    {"plan_grouped", py_plan_grouped, METH_VARARGS,
     "plan_grouped(shape, tile_tokens, limits=None) -> fields of a grouped plan; shape: (pairs, experts, top_k, n, k); tile_tokens: 0 for "
     "the best"},
    {"grouped_needs", py_grouped_needs, METH_VARARGS,
     "grouped_needs(shape, fields, limits=None) -> (shared memory per block, most tiles); ValueError: what is wrong"},
    {"grouped", py_grouped, METH_VARARGS,
     "grouped(x, ldx, packed, packed_bytes, scales, sorted_pairs, tile_experts, padded, tiles, out, shape, type, fields, pdl, stream)"},
    {"w4a4", py_w4a4, METH_VARARGS, "w4a4(a, a_scale, w, w_scale, alpha, out, m, n, k, out_type, mode, fault, stream)"},
    {"fake_quant", py_fake_quant, METH_VARARGS, "fake_quant(x, type, blocks, scale, out, stream)"},
    {"malloc", py_malloc, METH_VARARGS, "malloc(bytes) -> ptr"},
    {"free", py_free, METH_VARARGS, "free(ptr)"},
    {"copy", py_copy, METH_VARARGS, "copy(to, from, bytes, stream)"},
    {"fill", py_fill, METH_VARARGS, "fill(to, byte, bytes, stream)"},
    {"stream_new", py_stream_new, METH_NOARGS, "stream_new() -> stream"},
    {"stream_free", py_stream_free, METH_VARARGS, "stream_free(stream)"},
    {"stream_sync", py_stream_sync, METH_VARARGS, "stream_sync(stream)"},
    {"stream_after", py_stream_after, METH_VARARGS, "stream_after(stream, earlier): wait for the work that `earlier` has now"},
    {"capture_begin", py_capture_begin, METH_VARARGS, "capture_begin(stream)"},
    {"capture_end", py_capture_end, METH_VARARGS, "capture_end(stream) -> graph"},
    {"graph_time", py_graph_time, METH_VARARGS, "graph_time(graph, stream) -> ms of one launch"},
    {"graph_free", py_graph_free, METH_VARARGS, "graph_free(graph)"},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    module_state *state = state_of(module);
    state->error = PyErr_NewException("annie_quant._gemm.CudaError", PyExc_RuntimeError, NULL);
    if (!state->error) return -1;
    if (PyModule_AddObjectRef(module, "CudaError", state->error) < 0) return -1;
    PyObject *fields = PyDict_New();
    for (int number = 1; fields && aq_path_of(number); number++) {
        PyObject *names = PyUnicode_FromString(aq_path_of(number)->fields);
        if (!names || PyDict_SetItemString(fields, aq_path_of(number)->name, names) < 0) Py_CLEAR(fields);
        Py_XDECREF(names);
    }
    const int added = fields ? PyModule_AddObjectRef(module, "PLAN_FIELDS", fields) : -1;
    Py_XDECREF(fields);
    if (added < 0) return -1;
    return PyModule_AddStringConstant(module, "ARCHS", ANNIE_QUANT_ARCHS); /* from setup.py, as given to nvcc */
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    module_state *state = state_of(module);
    if (state) Py_VISIT(state->error);
    return 0;
}
static int module_clear(PyObject *module) {
    module_state *state = state_of(module);
    if (state) Py_CLEAR(state->error);
    return 0;
}

static void module_free(void *module) { (void)module_clear((PyObject *)module); }

/* Python objects are in the module's state only. State of the process (limits, memory pools, opt-ins) is behind atomics and a mutex. */
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_gemm",     "NVFP4 GEMM kernels; use annie_quant.gemm.", sizeof(module_state), methods, slots, module_traverse,
    module_clear,          module_free,
};

PyMODINIT_FUNC PyInit__gemm(void) { return PyModuleDef_Init(&definition); }
