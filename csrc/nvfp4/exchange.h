/* DLPack in and out (dmlc/dlpack, dlpack.h, version 0 structs): arrays of types that NumPy's own exchange refuses. */
#ifndef AQ_NVFP4_EXCHANGE_H
#define AQ_NVFP4_EXCHANGE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* from_dlpack(capsule) -> (owner, address of the first element, type code, bits, shape, strides in elements or None); the memory
 * lives as long as owner. */
PyObject *py_from_dlpack(PyObject *self, PyObject *capsule);

/* to_dlpack(owner, type code, bits, shape) -> capsule; owner is a contiguous writeable buffer that the capsule keeps. */
PyObject *py_to_dlpack(PyObject *self, PyObject *args);

#endif
