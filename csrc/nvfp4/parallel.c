/* Threads. Runs are distributed dynamically, because other work may use one of the processors. */
#define _GNU_SOURCE
#include "parallel.h"

#include "variant.h"

#include <omp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { RUN = 1 << 16 /* elements per unit of work: 128 KB of bfloat16, well inside a second-level cache */ };

static atomic_int threads, forked;

/* A forked child has none of its parent's worker threads, and the OpenMP runtime would wait for them forever. */
static void after_fork(void)
{
    atomic_store(&forked, 1);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, after_fork);
}

void threads_set(int count)
{
    atomic_store(&threads, count);
}

int threads_get(void)
{
    if (atomic_load(&forked))
        return 1;
    int n = atomic_load(&threads);
    return n > 0 ? n : omp_get_max_threads();
}

static int team(size_t elements)
{
    return elements <= RUN ? 1 : threads_get();
}

static size_t runs_of(size_t blocks, size_t per_run)
{
    return blocks / per_run + (blocks % per_run != 0);
}

static size_t run_length(size_t blocks, size_t per_run, size_t run)
{
    size_t first = run * per_run;
    return blocks - first < per_run ? blocks - first : per_run;
}

uint32_t tensor_amax(const void *x, int kind, size_t count)
{
    const struct codec_kernels *k = &kernels_current()->codec;
    const size_t runs = runs_of(count, RUN), size = kind_size(kind);
    uint32_t top = 0;
#pragma omp parallel for schedule(dynamic) num_threads(team(count)) reduction(max : top)
    for (size_t r = 0; r < runs; r++) {
        uint32_t t = k->amax((const char *)x + r * RUN * size, kind, run_length(count, RUN, r));
        top = t > top ? t : top;
    }
    return top;
}

/* From the last run to the first: the end of what tensor_amax has read is still in the caches. */
uint32_t tensor_pack(const struct pack_plan *plan, const void *x, size_t blocks, uint8_t *codes, uint8_t *scales)
{
    const struct codec_kernels *k = &kernels_current()->codec;
    const size_t group = (size_t)plan->group, per_run = RUN / group, runs = runs_of(blocks, per_run);
    const size_t bytes = group * kind_size(plan->kind);
    uint32_t top = 0;
#pragma omp parallel for schedule(dynamic) num_threads(team(blocks *group)) reduction(max : top)
    for (size_t left = runs; left > 0; left--) {
        size_t r = left - 1, b = r * per_run;
        uint32_t t = k->pack(plan, (const char *)x + b * bytes, b, run_length(blocks, per_run, r), codes + b * group / 2, scales + b);
        top = t > top ? t : top;
    }
    return top;
}

/* Simple, so that the compiler vectorizes it; the scales are an eighth of the codes. */
static int any_nan(const uint8_t *scales, size_t blocks)
{
    int bad = 0;
    for (size_t b = 0; b < blocks; b++)
        bad |= (scales[b] & 0x7f) == 0x7f;
    return bad;
}

bool tensor_unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks, void *out)
{
    const struct codec_kernels *k = &kernels_current()->codec;
    const size_t group = (size_t)plan->group, per_run = RUN / group, runs = runs_of(blocks, per_run);
    const size_t bytes = group * kind_size(plan->kind);
    int bad = 0;
#pragma omp parallel for schedule(dynamic) num_threads(team(blocks *group)) reduction(| : bad)
    for (size_t r = 0; r < runs; r++) {
        size_t b = r * per_run;
        size_t n = run_length(blocks, per_run, r);
        bad |= any_nan(scales + b, n);
        k->unpack(plan, codes + b * group / 2, scales + b, n, (char *)out + b * bytes);
    }
    return bad != 0;
}

void tensor_fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out)
{
    const struct codec_kernels *k = &kernels_current()->codec;
    const size_t group = (size_t)plan->group, per_run = RUN / group, runs = runs_of(blocks, per_run);
    const size_t bytes = group * kind_size(plan->kind);
#pragma omp parallel for schedule(dynamic) num_threads(team(blocks *group))
    for (size_t r = 0; r < runs; r++) {
        size_t b = r * per_run;
        k->fake_quant(plan, (const char *)x + b * bytes, run_length(blocks, per_run, r), (char *)out + b * bytes);
    }
}

/* One block at a time as floats. The row's mean square is summed in order over the whole row, as llama.cpp does. */
static void kquantize_row(const struct kq_kernels *kernels, const struct kq_type *type, const void *x, int kind, size_t start,
                          size_t columns, const float *weight, uint8_t *out)
{
    float v[256], row_square = 0;
    if (weight && type->block == 32) {
        for (size_t i = 0; i < columns; i++) {
            float f = load_as_float(x, kind, start + i);
            row_square += f * f;
        }
        row_square /= (float)columns;
    }
    for (size_t at = 0; at < columns; at += type->block, out += type->bytes) {
        for (size_t i = 0; i < type->block; i++)
            v[i] = load_as_float(x, kind, start + at + i);
        type->encode(kernels, v, weight ? weight + at : NULL, row_square, out);
    }
}

void tensor_kquantize(const struct kq_type *type, const void *x, int kind, size_t rows, size_t columns, const float *weight, uint8_t *out)
{
    const struct kq_kernels *kernels = &kernels_current()->kquant;
    const size_t row_bytes = columns / type->block * type->bytes;
#pragma omp parallel for schedule(dynamic) num_threads(team(rows *columns))
    for (size_t r = 0; r < rows; r++)
        kquantize_row(kernels, type, x, kind, r * columns, columns, weight, out + r * row_bytes);
}

void tensor_kdequantize(const struct kq_type *type, const uint8_t *raw, size_t blocks, float *out)
{
    void (*decode)(const void *, size_t, float *) = kernels_current()->kquant.decode[type - KQ_TYPE];
    const size_t per_run = RUN / type->block, runs = runs_of(blocks, per_run);
#pragma omp parallel for schedule(dynamic) num_threads(team(blocks * type->block))
    for (size_t r = 0; r < runs; r++) {
        size_t b = r * per_run;
        decode(raw + b * type->bytes, run_length(blocks, per_run, r), out + b * type->block);
    }
}
