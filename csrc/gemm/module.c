/* _gemm: the Python binding of the NVFP4 GEMM kernels. Pointers and sizes are integers that annie_quant/gemm has checked.
 * They are passed on, and a CUDA status becomes an exception. The driver is not used until a function is called. */
#include <Python.h>

#include "gemm/ceiling.h"
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
#define CALL(status, expr)             \
    do {                               \
        Py_BEGIN_ALLOW_THREADS         \
        (status) = (expr);             \
        Py_END_ALLOW_THREADS           \
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
    if (!PyArg_ParseTuple(args, "i", &device)) return NULL;
    CALL(status, aq_device_info(device, &d));
    if (status) return raise_status(module, status);
    return Py_BuildValue("{s:s,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:K}", "name", d.name, "major", d.major, "minor", d.minor, "sms", d.sms,
                         "clock_khz", d.clock_khz, "shared_memory_bytes", d.smem_block, "l2_bytes", d.l2_bytes, "driver", d.driver,
                         "runtime", d.runtime, "memory_bytes", (unsigned long long)d.memory_bytes);
}

static PyObject *py_pointer_device(PyObject *module, PyObject *args) {
    unsigned long long p;
    int device = -1, status;
    if (!PyArg_ParseTuple(args, "K", &p)) return NULL;
    CALL(status, aq_pointer_device(ptr(p), &device));
    return status ? raise_status(module, status) : PyLong_FromLong(device);
}

static PyObject *py_use_device(PyObject *module, PyObject *args) {
    int device, before = -1, status;
    if (!PyArg_ParseTuple(args, "i", &device)) return NULL;
    CALL(status, aq_use_device(device, &before));
    return status ? raise_status(module, status) : PyLong_FromLong(before);
}

static PyObject *py_packed_bytes(PyObject *module, PyObject *args) {
    long long n, k;
    (void)module;
    if (!PyArg_ParseTuple(args, "LL", &n, &k)) return NULL;
    return PyLong_FromSize_t(aq_packed_bytes(n, k));
}

static PyObject *py_repack(PyObject *module, PyObject *args) {
    unsigned long long codes, scales, packed, bad, stream;
    long long n, k;
    int fault, status;
    if (!PyArg_ParseTuple(args, "KKKLLKiK", &codes, &scales, &packed, &n, &k, &bad, &fault, &stream)) return NULL;
    CALL(status, aq_repack(ptr(codes), ptr(scales), ptr(packed), n, k, ptr(bad), fault, ptr(stream)));
    return done(module, status);
}

static PyObject *py_plan(PyObject *module, PyObject *args) {
    long long m, n, k;
    int path, status;
    aq_plan p;
    if (!PyArg_ParseTuple(args, "LLLi", &m, &n, &k, &path)) return NULL;
    CALL(status, aq_plan_w4a16(m, n, k, path, &p));
    if (status) return raise_status(module, status);
    return Py_BuildValue("(iiiiiiiiiL)", p.path, p.width, p.split, p.stages, p.blocks, p.smem, p.stream_k_tiles, p.rows, p.permuted,
                         (long long)p.workspace);
}

static PyObject *py_w4a16(PyObject *module, PyObject *args) {
    unsigned long long x, packed, out, workspace, stream;
    long long ldx, m, n, k, workspace_bytes;
    float scale;
    int x_type, out_type, pdl, status;
    aq_plan p;
    if (!PyArg_ParseTuple(args, "KLKfKKLLLii(iiiiiiiiiL)iK", &x, &ldx, &packed, &scale, &out, &workspace, &m, &n, &k, &x_type, &out_type,
                          &p.path, &p.width, &p.split, &p.stages, &p.blocks, &p.smem, &p.stream_k_tiles, &p.rows, &p.permuted,
                          &workspace_bytes, &pdl, &stream))
        return NULL;
    p.workspace = workspace_bytes;
    CALL(status, aq_w4a16(ptr(x), ldx, ptr(packed), scale, ptr(out), ptr(workspace), m, n, k, x_type, out_type, &p, pdl, ptr(stream)));
    return done(module, status);
}

static PyObject *py_w4a4(PyObject *module, PyObject *args) {
    unsigned long long a, sa, w, sw, out, stream;
    long long m, n, k;
    float alpha;
    int out_type, mode, fault, status;
    if (!PyArg_ParseTuple(args, "KKKKfKLLLiiiK", &a, &sa, &w, &sw, &alpha, &out, &m, &n, &k, &out_type, &mode, &fault, &stream))
        return NULL;
    CALL(status, aq_w4a4(ptr(a), ptr(sa), ptr(w), ptr(sw), alpha, ptr(out), m, n, k, out_type, mode, fault, ptr(stream)));
    return done(module, status);
}

static PyObject *py_fp4_native(PyObject *module, PyObject *unused) {
    int native = 0, status;
    (void)unused;
    CALL(status, aq_fp4_native(&native));
    return status ? raise_status(module, status) : PyBool_FromLong(native);
}

static PyObject *py_pack(PyObject *module, PyObject *args) {
    unsigned long long x, codes, scales, stream;
    long long blocks;
    float scale;
    int type, status;
    if (!PyArg_ParseTuple(args, "KiLfKKK", &x, &type, &blocks, &scale, &codes, &scales, &stream)) return NULL;
    CALL(status, aq_pack(ptr(x), type, blocks, scale, ptr(codes), ptr(scales), ptr(stream)));
    return done(module, status);
}

static PyObject *py_unpack(PyObject *module, PyObject *args) {
    unsigned long long codes, scales, out, stream;
    long long blocks;
    float scale;
    int type, status;
    if (!PyArg_ParseTuple(args, "KKLfKiK", &codes, &scales, &blocks, &scale, &out, &type, &stream)) return NULL;
    CALL(status, aq_unpack(ptr(codes), ptr(scales), blocks, scale, ptr(out), type, ptr(stream)));
    return done(module, status);
}

static PyObject *py_fake_quant(PyObject *module, PyObject *args) {
    unsigned long long x, out, stream;
    long long blocks;
    float scale;
    int type, status;
    if (!PyArg_ParseTuple(args, "KiLfKK", &x, &type, &blocks, &scale, &out, &stream)) return NULL;
    CALL(status, aq_fake_quant(ptr(x), type, blocks, scale, ptr(out), ptr(stream)));
    return done(module, status);
}

static PyObject *py_malloc(PyObject *module, PyObject *args) {
    long long bytes;
    void *p = NULL;
    int status;
    if (!PyArg_ParseTuple(args, "L", &bytes)) return NULL;
    CALL(status, aq_malloc(bytes, &p));
    return status ? raise_status(module, status) : PyLong_FromVoidPtr(p);
}

static PyObject *py_free(PyObject *module, PyObject *args) {
    unsigned long long p;
    int status;
    if (!PyArg_ParseTuple(args, "K", &p)) return NULL;
    CALL(status, aq_free(ptr(p)));
    return done(module, status);
}

static PyObject *py_copy(PyObject *module, PyObject *args) {
    unsigned long long to, from, stream;
    long long bytes;
    int status;
    if (!PyArg_ParseTuple(args, "KKLK", &to, &from, &bytes, &stream)) return NULL;
    CALL(status, aq_copy(ptr(to), ptr(from), bytes, ptr(stream)));
    return done(module, status);
}

static PyObject *py_fill(PyObject *module, PyObject *args) {
    unsigned long long to, stream;
    long long bytes;
    int value, status;
    if (!PyArg_ParseTuple(args, "KiLK", &to, &value, &bytes, &stream)) return NULL;
    CALL(status, aq_fill(ptr(to), value, bytes, ptr(stream)));
    return done(module, status);
}

static PyObject *py_read(PyObject *module, PyObject *args) {
    unsigned long long from, sink, stream;
    long long bytes;
    int sms, status;
    if (!PyArg_ParseTuple(args, "KLKiK", &from, &bytes, &sink, &sms, &stream)) return NULL;
    CALL(status, aq_read(ptr(from), bytes, ptr(sink), sms, ptr(stream)));
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
    if (!PyArg_ParseTuple(args, "K", &handle)) return NULL;
    CALL(status, call(ptr(handle)));
    return done(module, status);
}
static PyObject *py_stream_free(PyObject *module, PyObject *args) { return handle_call(module, args, aq_stream_free); }
static PyObject *py_stream_sync(PyObject *module, PyObject *args) { return handle_call(module, args, aq_stream_sync); }
static PyObject *py_capture_begin(PyObject *module, PyObject *args) { return handle_call(module, args, aq_capture_begin); }
static PyObject *py_graph_free(PyObject *module, PyObject *args) { return handle_call(module, args, aq_graph_free); }

static PyObject *py_capture_end(PyObject *module, PyObject *args) {
    unsigned long long stream;
    void *exec = NULL;
    int status;
    if (!PyArg_ParseTuple(args, "K", &stream)) return NULL;
    CALL(status, aq_capture_end(ptr(stream), &exec));
    return status ? raise_status(module, status) : PyLong_FromVoidPtr(exec);
}

static PyObject *py_graph_time(PyObject *module, PyObject *args) {
    unsigned long long exec, stream;
    float ms = 0;
    int status;
    if (!PyArg_ParseTuple(args, "KK", &exec, &stream)) return NULL;
    CALL(status, aq_graph_time(ptr(exec), ptr(stream), &ms));
    return status ? raise_status(module, status) : PyFloat_FromDouble(ms);
}

static PyMethodDef methods[] = {
    {"device_count", py_device_count, METH_NOARGS, "device_count() -> number of CUDA devices"},
    {"device_info", py_device_info, METH_VARARGS, "device_info(device) -> dict"},
    {"pointer_device", py_pointer_device, METH_VARARGS, "pointer_device(ptr) -> device, or -1 for host memory"},
    {"use_device", py_use_device, METH_VARARGS, "use_device(device) -> the previous device"},
    {"packed_bytes", py_packed_bytes, METH_VARARGS, "packed_bytes(n, k) -> bytes of the repacked weight"},
    {"repack", py_repack, METH_VARARGS, "repack(codes, scales, packed, n, k, bad, fault, stream)"},
    {"plan", py_plan, METH_VARARGS, "plan(m, n, k, path) -> (path, width, split, stages, blocks, smem, stream_k_tiles, rows, permuted, workspace)"},
    {"w4a16", py_w4a16, METH_VARARGS, "w4a16(x, ldx, packed, scale, out, workspace, m, n, k, x_type, out_type, plan, pdl, stream)"},
    {"w4a4", py_w4a4, METH_VARARGS, "w4a4(a, a_scale, w, w_scale, alpha, out, m, n, k, out_type, mode, fault, stream)"},
    {"fp4_native", py_fp4_native, METH_NOARGS, "fp4_native() -> whether the code for this device has the native FP4 instruction"},
    {"pack", py_pack, METH_VARARGS, "pack(x, type, blocks, scale, codes, scales, stream)"},
    {"unpack", py_unpack, METH_VARARGS, "unpack(codes, scales, blocks, scale, out, type, stream)"},
    {"fake_quant", py_fake_quant, METH_VARARGS, "fake_quant(x, type, blocks, scale, out, stream)"},
    {"malloc", py_malloc, METH_VARARGS, "malloc(bytes) -> ptr"},
    {"free", py_free, METH_VARARGS, "free(ptr)"},
    {"copy", py_copy, METH_VARARGS, "copy(to, from, bytes, stream)"},
    {"fill", py_fill, METH_VARARGS, "fill(to, byte, bytes, stream)"},
    {"read", py_read, METH_VARARGS, "read(from, bytes, sink, sms, stream): only reads memory"},
    {"stream_new", py_stream_new, METH_NOARGS, "stream_new() -> stream"},
    {"stream_free", py_stream_free, METH_VARARGS, "stream_free(stream)"},
    {"stream_sync", py_stream_sync, METH_VARARGS, "stream_sync(stream)"},
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
    Py_INCREF(state->error);
    if (PyModule_AddObject(module, "CudaError", state->error) < 0) {
        Py_DECREF(state->error);
        return -1;
    }
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

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_gemm", "NVFP4 GEMM kernels; use annie_quant.gemm.", sizeof(module_state), methods, slots,
    module_traverse, module_clear, NULL,
};

PyMODINIT_FUNC PyInit__gemm(void) { return PyModuleDef_Init(&definition); }
