/* DLPack import and export (dmlc/dlpack, dlpack.h, version 0 structs) for types that NumPy's own exchange does not support. */
#ifndef AQ_NVFP4_EXCHANGE_H
#define AQ_NVFP4_EXCHANGE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* from_dlpack(capsule) -> (owner, address of the first element, type code, bits, shape, strides in elements or None). The memory
 * is valid as long as owner lives. */
PyObject *py_from_dlpack(PyObject *self, PyObject *capsule);

/* to_dlpack(owner, type code, bits, shape) -> capsule. owner: a contiguous writeable buffer, kept alive by the capsule. */
PyObject *py_to_dlpack(PyObject *self, PyObject *args);

#endif
