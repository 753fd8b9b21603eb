/* Conversion of DLPack capsules to and from buffers. The struct layouts are those of dlpack.h, version 0.8. */
#include "exchange.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { DEVICE_CPU = 1, MOST_DIMENSIONS = 32 };

struct dl_tensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_managed {
    struct dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *);
};

static void release(PyObject *capsule)
{
    struct dl_managed *managed = PyCapsule_GetPointer(capsule, "annie_quant.used");
    if (managed && managed->deleter)
        managed->deleter(managed);
}

static PyObject *numbers(const int64_t *values, int count)
{
    PyObject *result = PyTuple_New(count);
    for (int i = 0; result && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(values[i]);
        if (!number)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, i, number);
    }
    return result;
}

PyObject *py_from_dlpack(PyObject *self, PyObject *capsule)
{
    (void)self;
    struct dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (!managed)
        return NULL;
    const struct dl_tensor *t = &managed->tensor;
    if (t->device_type != DEVICE_CPU)
        return PyErr_Format(PyExc_ValueError, "on DLPack device %d, expected 1 (CPU)", (int)t->device_type);
    if (t->lanes != 1 || t->ndim < 0 || t->ndim > MOST_DIMENSIONS)
        return PyErr_Format(PyExc_ValueError, "DLPack tensor of %d dimensions and %d lanes, expected up to %d and 1", (int)t->ndim,
                            (int)t->lanes, MOST_DIMENSIONS);
    PyObject *shape = numbers(t->shape, t->ndim), *strides = t->strides ? numbers(t->strides, t->ndim) : Py_NewRef(Py_None);
    PyObject *owner = NULL, *result = NULL;
    if (!shape || !strides || !(owner = PyCapsule_New(managed, "annie_quant.used", NULL)))
        goto cleanup;
    result = Py_BuildValue("(OKBBOO)", owner, (unsigned long long)(uintptr_t)t->data + t->byte_offset, t->code, t->bits, shape, strides);
    /* From here on this module must release the tensor; a capsule can be used only once. */
    if (result && (PyCapsule_SetName(capsule, "used_dltensor") < 0 || PyCapsule_SetDestructor(owner, release) < 0))
        Py_CLEAR(result);
cleanup:
    Py_XDECREF(owner);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return result;
}

/* What an exported capsule keeps alive. */
struct lent {
    struct dl_managed managed;
    Py_buffer buffer;
    int64_t shape[MOST_DIMENSIONS];
};

/* The caller runs Python code in some interpreter, that is, it has a thread state. */
static void release_lent(struct lent *lent)
{
    PyBuffer_Release(&lent->buffer);
    free(lent);
}

#if PY_VERSION_HEX >= 0x030d0000
#define current_thread_state PyThreadState_GetUnchecked
#else
#define current_thread_state _PyThreadState_UncheckedGet
#endif

/* The consumer may call this from any thread. PyGILState_Ensure is for threads without a thread state alone: in a sub-interpreter it
 * would take the main interpreter's state of the same thread, and deadlock or abort. */
static void give_back(struct dl_managed *managed)
{
    if (current_thread_state()) {
        release_lent(managed->context);
        return;
    }
    PyGILState_STATE state = PyGILState_Ensure();
    release_lent(managed->context);
    PyGILState_Release(state);
}

/* The destructor of a capsule that no consumer took; Python calls it with a thread state. */
static void never_taken(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor"))
        release_lent(((struct dl_managed *)PyCapsule_GetPointer(capsule, "dltensor"))->context);
}

PyObject *py_to_dlpack(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *owner, *shape, *capsule;
    unsigned char code, bits;
    if (!PyArg_ParseTuple(args, "ObbO!", &owner, &code, &bits, &PyTuple_Type, &shape))
        return NULL;
    Py_ssize_t dimensions = PyTuple_GET_SIZE(shape);
    struct lent *lent = dimensions <= MOST_DIMENSIONS ? calloc(1, sizeof *lent) : NULL;
    if (!lent)
        return dimensions <= MOST_DIMENSIONS
                   ? PyErr_NoMemory()
                   : PyErr_Format(PyExc_ValueError, "%zd dimensions, expected up to %d", dimensions, MOST_DIMENSIONS);
    size_t want = bits / 8;
    bool fits = true;
    for (Py_ssize_t i = 0; i < dimensions; i++) {
        lent->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        fits = fits && lent->shape[i] >= 0 && !__builtin_mul_overflow(want, (size_t)lent->shape[i], &want);
    }
    if (PyErr_Occurred() || PyObject_GetBuffer(owner, &lent->buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        free(lent);
        return NULL;
    }
    if (!fits || (size_t)lent->buffer.len != want) {
        PyErr_Format(PyExc_ValueError, "%zd bytes, expected %zu for this shape", lent->buffer.len, want);
        goto failed;
    }
    lent->managed.tensor = (struct dl_tensor){.data = lent->buffer.buf,
                                              .device_type = DEVICE_CPU,
                                              .ndim = (int32_t)dimensions,
                                              .code = code,
                                              .bits = bits,
                                              .lanes = 1,
                                              .shape = lent->shape};
    lent->managed.context = lent;
    lent->managed.deleter = give_back;
    capsule = PyCapsule_New(&lent->managed, "dltensor", never_taken);
    if (capsule)
        return capsule;
failed:
    PyBuffer_Release(&lent->buffer);
    free(lent);
    return NULL;
}
