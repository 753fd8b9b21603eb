/* annie_quant._nvfp4: the Python binding. It only converts arguments and checks sizes.
 *
 * It does not need NumPy: arrays are passed through the buffer protocol, bfloat16 and float8 as integers of the same size
 * (annie_quant/core/codec_arrays.py makes these views). The GIL is released in every kernel. The only state is the selected
 * variant and the number of threads, both atomic, and the pool of workers (pool.c), which one job has at a time.
 */
#include "common/buffers.h"
#include "gemv.h"
#include "gptq.h"
#include "layout.h"
#include "parallel.h"
#include "pool.h"
#include "variant.h"

#include <float.h>

static bool kind_known(int kind)
{
    if (kind >= KIND_F32 && kind <= KIND_BF16)
        return true;
    PyErr_Format(PyExc_ValueError, "kind %d, expected 0, 1 or 2 (float32, float16, bfloat16)", kind);
    return false;
}

static bool group_known(int group)
{
    if (group == 16 || group == 32 || group == 64)
        return true;
    PyErr_Format(PyExc_ValueError, "group %d, expected 16, 32 or 64", group);
    return false;
}

/* Number of blocks of `unit` bytes in the buffer; false with ValueError if it is not a whole number. */
static bool whole_units(const Py_buffer *b, size_t unit, const char *what, size_t *count)
{
    *count = (size_t)b->len / unit;
    if (*count * unit == (size_t)b->len)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes, expected a multiple of %zu", what, b->len, unit);
    return false;
}

static PyObject *py_amax(PyObject *self, PyObject *args)
{
    (void)self;
    SCOPED_BUFFER x = {0};
    int kind;
    size_t count;
    if (!PyArg_ParseTuple(args, "y*i:amax", &x, &kind))
        return NULL;
    if (!kind_known(kind) || !whole_units(&x, kind_size(kind), "x", &count))
        return NULL;
    uint32_t top;
    Py_BEGIN_ALLOW_THREADS
    top = tensor_amax(x.buf, kind, count);
    Py_END_ALLOW_THREADS
    uint16_t half = (uint16_t)top;
    return PyFloat_FromDouble(kind == KIND_F32 ? bits_float(top) : load_as_float(&half, kind, 0));
}

/* The factor of all block scales: a multiplier or a divisor. */
static bool factor_valid(float factor)
{
    if (factor > 0 && factor <= FLT_MAX) /* false for NaN, too */
        return true;
    char text[32];
    PyOS_snprintf(text, sizeof text, "%g", (double)factor);
    PyErr_Format(PyExc_ValueError, "tensor_scale %s, expected a positive finite number", text);
    return false;
}

static bool plan_known(const struct pack_plan *plan)
{
    if (!kind_known(plan->kind) || !group_known(plan->group))
        return false;
    if (plan->choice < CHOICE_AMAX || plan->choice > CHOICE_SWEEP || plan->encoding < ENCODING_MODELOPT || plan->encoding > ENCODING_CT) {
        PyErr_Format(PyExc_ValueError, "choice %d, encoding %d, expected 0, 1 or 2", plan->choice, plan->encoding);
        return false;
    }
    return true;
}

static PyObject *py_pack(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *weights;
    SCOPED_BUFFER x = {0}, weight = {0}, codes = {0}, scales = {0};
    struct pack_plan plan;
    size_t blocks;
    memset(&plan, 0, sizeof plan);
    if (!PyArg_ParseTuple(args, "y*iiiifffOw*w*:pack", &x, &plan.kind, &plan.group, &plan.choice, &plan.encoding, &plan.tensor_scale,
                          &plan.largest_code, &plan.tensor_amax, &weights, &codes, &scales))
        return NULL;
    if (!plan_known(&plan) || !whole_units(&x, (size_t)plan.group * kind_size(plan.kind), "x", &blocks) ||
        !buffer_has_size(&codes, blocks * (size_t)plan.group / 2, "codes") || !buffer_has_size(&scales, blocks, "scales"))
        return NULL;
    if (weights != Py_None) {
        if (PyObject_GetBuffer(weights, &weight, PyBUF_C_CONTIGUOUS) < 0)
            return NULL;
        if (!whole_units(&weight, (size_t)plan.group * sizeof(float), "importance", &plan.columns))
            return NULL;
        plan.columns *= (size_t)plan.group;
        if (plan.columns == 0) {
            PyErr_SetString(PyExc_ValueError, "importance is empty");
            return NULL;
        }
        plan.weight = weight.buf;
    }
    if (!OUTPUTS_DISJOINT(2, {&codes, "codes"}, {&scales, "scales"}, {&x, "x"}, {&weight, "importance"}))
        return NULL;
    uint32_t top;
    Py_BEGIN_ALLOW_THREADS
    plan_prepare(&plan);
    top = tensor_pack(&plan, x.buf, blocks, codes.buf, scales.buf);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(top < first_nonfinite(plan.kind));
}

static PyObject *py_unpack(PyObject *self, PyObject *args)
{
    (void)self;
    SCOPED_BUFFER codes = {0}, scales = {0}, out = {0};
    struct unpack_plan plan;
    int divides;
    if (!PyArg_ParseTuple(args, "y*y*iipfw*:unpack", &codes, &scales, &plan.kind, &plan.group, &divides, &plan.tensor_scale, &out))
        return NULL;
    plan.divides = divides != 0;
    size_t blocks = (size_t)scales.len;
    if (!kind_known(plan.kind) || !group_known(plan.group))
        return NULL;
    size_t elements, out_bytes;
    if (!size_product(blocks, (size_t)plan.group, &elements) || !size_product(elements, kind_size(plan.kind), &out_bytes)) {
        PyErr_Format(PyExc_ValueError, "%zu block scales are too many", blocks);
        return NULL;
    }
    if (!buffer_has_size(&codes, elements / 2, "codes") || !buffer_has_size(&out, out_bytes, "out") ||
        !OUTPUTS_DISJOINT(1, {&out, "out"}, {&codes, "codes"}, {&scales, "block scales"}))
        return NULL;
    bool valid;
    Py_BEGIN_ALLOW_THREADS
    unpack_prepare(&plan);
    valid = tensor_unpack(&plan, codes.buf, scales.buf, blocks, out.buf);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(valid);
}

static PyObject *py_fake_quant(PyObject *self, PyObject *args)
{
    (void)self;
    SCOPED_BUFFER x = {0}, out = {0};
    struct fake_plan plan;
    size_t blocks;
    if (!PyArg_ParseTuple(args, "y*iifw*:fake_quant", &x, &plan.kind, &plan.group, &plan.tensor_scale, &out))
        return NULL;
    if (!kind_known(plan.kind) || !group_known(plan.group) || !whole_units(&x, (size_t)plan.group * kind_size(plan.kind), "x", &blocks) ||
        !buffer_has_size(&out, (size_t)x.len, "out"))
        return NULL;
    if (x.buf != out.buf && !OUTPUTS_DISJOINT(1, {&out, "out"}, {&x, "x"})) /* the same memory is allowed, a partial overlap is not */
        return NULL;
    if (!factor_valid(plan.tensor_scale))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    tensor_fake_quant(&plan, x.buf, blocks, out.buf);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_gemv(PyObject *self, PyObject *args)
{
    (void)self;
    SCOPED_BUFFER x = {0}, codes = {0}, scales = {0}, y = {0};
    struct gemv_plan plan;
    Py_ssize_t columns;
    int divides;
    size_t y_size, y_bytes;
    if (!PyArg_ParseTuple(args, "y*iny*y*ipfw*:gemv", &x, &plan.kind, &columns, &codes, &scales, &plan.group, &divides, &plan.tensor_scale,
                          &y))
        return NULL;
    if (!kind_known(plan.kind) || !group_known(plan.group))
        return NULL;
    if (columns <= 0 || columns % plan.group || columns > PY_SSIZE_T_MAX / 8) {
        PyErr_Format(PyExc_ValueError, "rows of %zd, expected a multiple of %d", columns, plan.group);
        return NULL;
    }
    plan.columns = (size_t)columns;
    plan.divides = divides != 0;
    if (!factor_valid(plan.tensor_scale))
        return NULL;
    if (!whole_units(&codes, plan.columns / 2, "codes", &plan.rows) ||
        !whole_units(&x, plan.columns * kind_size(plan.kind), "x", &plan.tokens) ||
        !buffer_has_size(&scales, plan.rows * (plan.columns / (size_t)plan.group), "block scales") ||
        !size_product(plan.tokens, plan.rows, &y_size) || !size_product(y_size, kind_size(plan.kind), &y_bytes) ||
        !buffer_has_size(&y, y_bytes, "y") || !OUTPUTS_DISJOINT(1, {&y, "y"}, {&x, "x"}, {&codes, "codes"}, {&scales, "block scales"}))
        return NULL;
    enum gemv_result result;
    Py_BEGIN_ALLOW_THREADS
    result = gemv(&plan, x.buf, codes.buf, scales.buf, y.buf);
    Py_END_ALLOW_THREADS
    return result == GEMV_NO_MEMORY ? PyErr_NoMemory() : PyBool_FromLong(result == GEMV_DONE);
}

static PyObject *py_gptq(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *weights;
    SCOPED_BUFFER w = {0}, factor = {0}, weight = {0}, codes = {0}, scales = {0};
    struct gptq_plan plan;
    Py_ssize_t columns;
    size_t row_bytes, square, scratch;
    float *errors;
    memset(&plan, 0, sizeof plan);
    plan.codec.kind = KIND_F32;
    if (!PyArg_ParseTuple(args, "w*ny*iiffOw*w*:gptq", &w, &columns, &factor, &plan.codec.group, &plan.codec.choice,
                          &plan.codec.tensor_scale, &plan.codec.largest_code, &weights, &codes, &scales))
        return NULL;
    if (!plan_known(&plan.codec))
        return NULL;
    plan.columns = (size_t)columns;
    if (columns <= 0 || plan.columns % (size_t)plan.codec.group || !size_product(plan.columns, sizeof(float), &row_bytes) ||
        !size_product(row_bytes, plan.columns, &square)) {
        PyErr_Format(PyExc_ValueError, "%zd columns, expected a multiple of %d", columns, plan.codec.group);
        return NULL;
    }
    if (!whole_units(&w, row_bytes, "w", &plan.rows) || !buffer_has_size(&factor, square, "factor") ||
        !buffer_has_size(&codes, plan.rows * plan.columns / 2, "codes") ||
        !buffer_has_size(&scales, plan.rows * (plan.columns / (size_t)plan.codec.group), "scales"))
        return NULL;
    if (weights != Py_None &&
        (PyObject_GetBuffer(weights, &weight, PyBUF_C_CONTIGUOUS) < 0 || !buffer_has_size(&weight, row_bytes, "importance")))
        return NULL;
    if (!OUTPUTS_DISJOINT(3, {&w, "w"}, {&codes, "codes"}, {&scales, "scales"}, {&factor, "factor"}, {&weight, "importance"}))
        return NULL;
    if (!size_product(plan.rows, GPTQ_WINDOW * sizeof(float), &scratch) || !(errors = malloc(scratch ? scratch : 1))) {
        PyErr_NoMemory();
        return NULL;
    }
    plan.codec.weight = weight.buf;
    plan.factor = factor.buf;
    int finite;
    Py_BEGIN_ALLOW_THREADS
    plan_prepare(&plan.codec);
    finite = gptq(&plan, w.buf, errors, codes.buf, scales.buf);
    free(errors);
    Py_END_ALLOW_THREADS
    return finite < 0 ? PyErr_NoMemory() : PyBool_FromLong(finite);
}

static PyObject *py_to_ggml(PyObject *self, PyObject *args)
{
    (void)self;
    SCOPED_BUFFER codes = {0}, scales = {0}, out = {0};
    size_t blocks;
    if (!PyArg_ParseTuple(args, "y*y*w*:to_ggml", &codes, &scales, &out))
        return NULL;
    if (!whole_units(&codes, 32, "codes", &blocks) || !buffer_has_size(&scales, blocks * 4, "block scales") ||
        !buffer_has_size(&out, blocks * sizeof(struct ggml_nvfp4), "out") ||
        !OUTPUTS_DISJOINT(1, {&out, "out"}, {&codes, "codes"}, {&scales, "block scales"}))
        return NULL;
    bool valid;
    Py_BEGIN_ALLOW_THREADS
    valid = scales_valid(scales.buf, blocks * 4);
    if (valid)
        to_ggml(codes.buf, scales.buf, blocks, out.buf);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(valid);
}

static PyObject *py_from_ggml(PyObject *self, PyObject *args)
{
    (void)self;
    SCOPED_BUFFER in = {0}, codes = {0}, scales = {0};
    size_t blocks;
    if (!PyArg_ParseTuple(args, "y*w*w*:from_ggml", &in, &codes, &scales))
        return NULL;
    if (!whole_units(&in, sizeof(struct ggml_nvfp4), "blocks", &blocks) || !buffer_has_size(&codes, blocks * 32, "codes") ||
        !buffer_has_size(&scales, blocks * 4, "block scales") ||
        !OUTPUTS_DISJOINT(2, {&codes, "codes"}, {&scales, "block scales"}, {&in, "blocks"}))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    from_ggml(in.buf, blocks, codes.buf, scales.buf);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* swizzle(scales, rows, columns, out) and unswizzle(tiles, rows, columns, out) differ in which side is padded. */
static PyObject *move_scales(PyObject *args, bool to_tiles)
{
    SCOPED_BUFFER in = {0}, out = {0};
    Py_ssize_t rows, columns;
    size_t plain;
    if (!PyArg_ParseTuple(args, "y*nnw*:swizzle", &in, &rows, &columns, &out))
        return NULL;
    if (rows < 0 || columns < 0 || !size_product((size_t)rows, (size_t)columns, &plain) || plain > (size_t)PY_SSIZE_T_MAX / 1024) {
        PyErr_Format(PyExc_ValueError, "%zd rows of %zd scales, expected numbers >= 0 whose product a tensor can have", rows, columns);
        return NULL;
    }
    size_t padded = swizzled_size((size_t)rows, (size_t)columns);
    if (!buffer_has_size(&in, to_tiles ? plain : padded, "in") || !buffer_has_size(&out, to_tiles ? padded : plain, "out") ||
        !OUTPUTS_DISJOINT(1, {&out, "out"}, {&in, "in"}))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (to_tiles)
        swizzle(in.buf, (size_t)rows, (size_t)columns, out.buf);
    else
        unswizzle(in.buf, (size_t)rows, (size_t)columns, out.buf);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_swizzle(PyObject *self, PyObject *args)
{
    (void)self;
    return move_scales(args, true);
}

static PyObject *py_unswizzle(PyObject *self, PyObject *args)
{
    (void)self;
    return move_scales(args, false);
}

static const struct kq_type *kq_find(const char *name)
{
    for (int i = 0; i < KQ_TYPES; i++)
        if (strcmp(KQ_TYPE[i].name, name) == 0)
            return KQ_TYPE + i;
    PyErr_Format(PyExc_ValueError, "type %s, expected one of Q4_K Q5_K Q6_K Q5_0 Q4_0 Q8_0", name);
    return NULL;
}

static PyObject *py_kquantize(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *weights;
    SCOPED_BUFFER x = {0}, weight = {0}, out = {0};
    const char *name;
    int kind;
    Py_ssize_t columns;
    size_t rows;
    if (!PyArg_ParseTuple(args, "y*isnOw*:kquantize", &x, &kind, &name, &columns, &weights, &out))
        return NULL;
    const struct kq_type *type = kq_find(name);
    if (!type || !kind_known(kind))
        return NULL;
    if (columns <= 0 || (size_t)columns % type->block || columns > PY_SSIZE_T_MAX / 8) {
        PyErr_Format(PyExc_ValueError, "rows of %zd, expected a multiple of %zu for %s", columns, type->block, name);
        return NULL;
    }
    if (!whole_units(&x, (size_t)columns * kind_size(kind), "x", &rows) ||
        !buffer_has_size(&out, rows * ((size_t)columns / type->block * type->bytes), "out"))
        return NULL;
    if (weights != Py_None && (PyObject_GetBuffer(weights, &weight, PyBUF_C_CONTIGUOUS) < 0 ||
                               !buffer_has_size(&weight, (size_t)columns * sizeof(float), "importance")))
        return NULL;
    if (!OUTPUTS_DISJOINT(1, {&out, "out"}, {&x, "x"}, {&weight, "importance"}))
        return NULL;
    size_t bad_row;
    Py_BEGIN_ALLOW_THREADS
    bad_row = tensor_kquantize(type, x.buf, kind, rows, (size_t)columns, weight.buf, out.buf);
    Py_END_ALLOW_THREADS
    return bad_row == rows ? Py_NewRef(Py_None) : PyLong_FromSize_t(bad_row);
}

static PyObject *py_kdequantize(PyObject *self, PyObject *args)
{
    (void)self;
    SCOPED_BUFFER raw = {0}, out = {0};
    const char *name;
    size_t blocks;
    if (!PyArg_ParseTuple(args, "y*sw*:kdequantize", &raw, &name, &out))
        return NULL;
    const struct kq_type *type = kq_find(name);
    if (!type || !whole_units(&raw, type->bytes, "raw", &blocks) || !buffer_has_size(&out, blocks * type->block * sizeof(float), "out") ||
        !OUTPUTS_DISJOINT(1, {&out, "out"}, {&raw, "raw"}))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    tensor_kdequantize(type, raw.buf, blocks, out.buf);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_variants(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    const char *const *names = variant_names();
    Py_ssize_t count = 0;
    while (names[count])
        count++;
    PyObject *result = PyTuple_New(count);
    for (Py_ssize_t i = 0; result && i < count; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name)
            Py_CLEAR(result);
        else
            PyTuple_SET_ITEM(result, i, name);
    }
    return result;
}

static PyObject *py_variant(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyUnicode_FromString(variant_name());
}

static PyObject *py_set_variant(PyObject *self, PyObject *name)
{
    (void)self;
    if (!PyUnicode_Check(name))
        return PyErr_Format(PyExc_TypeError, "variant is a %s, expected a string", Py_TYPE(name)->tp_name);
    const char *text = PyUnicode_AsUTF8(name);
    if (!text)
        return NULL;
    if (!variant_set(text))
        return PyErr_Format(PyExc_ValueError, "variant %s is not one that this processor runs", text);
    Py_RETURN_NONE;
}

static PyObject *py_threads(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyLong_FromLong(threads_get());
}

static PyObject *py_set_threads(PyObject *self, PyObject *count)
{
    (void)self;
    if (!PyLong_Check(count))
        return PyErr_Format(PyExc_TypeError, "threads is a %s, expected a whole number", Py_TYPE(count)->tp_name);
    int overflow;
    const long n = PyLong_AsLongAndOverflow(count, &overflow);
    if (overflow || n < 0 || n > MAX_THREADS)
        return PyErr_Format(PyExc_ValueError, "%S threads, expected 0 (all) to %d", count, MAX_THREADS);
    threads_set((int)n);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"amax", py_amax, METH_VARARGS, "amax(x, kind) -> float: largest |x|, NaN if there is one."},
    {"pack", py_pack, METH_VARARGS,
     "pack(x, kind, group, choice, encoding, tensor_scale, largest_code, tensor_amax, importance, codes, scales) -> all "
     "finite?"},
    {"unpack", py_unpack, METH_VARARGS, "unpack(codes, scales, kind, group, divides, tensor_scale, out) -> all scales valid?"},
    {"fake_quant", py_fake_quant, METH_VARARGS, "fake_quant(x, kind, group, tensor_scale, out)"},
    {"gemv", py_gemv, METH_VARARGS,
     "gemv(x, kind, columns, codes, scales, group, divides, tensor_scale, y) -> all scales valid?  y = x W^T"},
    {"gptq", py_gptq, METH_VARARGS,
     "gptq(w, columns, factor, group, choice, tensor_scale, largest_code, importance, codes, scales) -> all finite?"},
    {"to_ggml", py_to_ggml, METH_VARARGS, "to_ggml(codes, scales, out) -> all scales valid? If not, out is not changed."},
    {"from_ggml", py_from_ggml, METH_VARARGS, "from_ggml(blocks, codes, scales)"},
    {"swizzle", py_swizzle, METH_VARARGS, "swizzle(scales, rows, columns, out)"},
    {"unswizzle", py_unswizzle, METH_VARARGS, "unswizzle(tiles, rows, columns, out)"},
    {"kquantize", py_kquantize, METH_VARARGS,
     "kquantize(x, kind, type, columns, importance, out) -> None, or the first row with a scale that has no float16"},
    {"kdequantize", py_kdequantize, METH_VARARGS, "kdequantize(raw, type, out)"},
    {"variants", py_variants, METH_NOARGS, "variants() -> names this processor runs, slowest first"},
    {"variant", py_variant, METH_NOARGS, "variant() -> the name in use"},
    {"set_variant", py_set_variant, METH_O, "set_variant(name or 'auto')"},
    {"threads", py_threads, METH_NOARGS, "threads() -> how many a large tensor gets"},
    {"set_threads", py_set_threads, METH_O, "set_threads(count), 0 for all"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030c0000
    /* Not tested there: NumPy, whose arrays it takes, does not load in sub-interpreters with a GIL per interpreter. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030d0000
    /* The module has no state but two settings, which are atomic, and the pool, which is locked; a call owns its buffers. */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "annie_quant._nvfp4",
    .m_doc = "The NVFP4 and K-quant kernels; use annie_quant.nvfp4 and annie_quant.kquant.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__nvfp4(void)
{
    return PyModuleDef_Init(&definition);
}
