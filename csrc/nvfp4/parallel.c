/* Whole tensors in units of RUN elements: one function per operation computes a unit. */
#include "parallel.h"

#include "pool.h"
#include "variant.h"

#include <stdatomic.h>

enum { RUN = 1 << 16 /* elements per unit of work: 128 KB of bfloat16, well inside a second-level cache */ };

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

static void raise_to(atomic_uint *top, uint32_t value)
{
    unsigned before = atomic_load(top);
    while (before < value && !atomic_compare_exchange_weak(top, &before, value))
        continue;
}

struct amax_job {
    const struct codec_kernels *kernels;
    const char *x;
    int kind;
    size_t count;
    atomic_uint top;
};

static void amax_unit(void *context, size_t unit, int worker)
{
    struct amax_job *job = context;
    (void)worker;
    const char *x = job->x + unit * RUN * kind_size(job->kind);
    raise_to(&job->top, job->kernels->amax(x, job->kind, run_length(job->count, RUN, unit)));
}

uint32_t tensor_amax(const void *x, int kind, size_t count)
{
    struct amax_job job = {&kernels_current()->codec, x, kind, count, 0};
    run_units(runs_of(count, RUN), team(count), amax_unit, &job);
    return atomic_load(&job.top);
}

/* An operation on blocks of `group` columns. x: of the kind's size; out: the other side. */
struct block_job {
    const struct codec_kernels *kernels;
    const void *plan;
    size_t group, per_run, runs, blocks, bytes; /* bytes: of a block of x */
    const char *x;
    char *out;
    const uint8_t *codes, *scales;
    uint8_t *codes_out, *scales_out;
    atomic_uint top; /* of pack: the largest |bits| of x; of unpack: 1 if a scale is invalid */
};

static struct block_job block_job_of(const void *plan, int kind, int group, size_t blocks)
{
    struct block_job job = {.kernels = &kernels_current()->codec, .plan = plan, .group = (size_t)group, .blocks = blocks};
    job.per_run = RUN / job.group;
    job.runs = runs_of(blocks, job.per_run);
    job.bytes = job.group * kind_size(kind);
    return job;
}

static void run_blocks(struct block_job *job, unit_function run)
{
    run_units(job->runs, team(job->blocks * job->group), run, job);
}

/* From the last run to the first: the end of what tensor_amax has read is still in the caches. */
static void pack_unit(void *context, size_t unit, int worker)
{
    struct block_job *job = context;
    (void)worker;
    const size_t run = job->runs - 1 - unit, first = run * job->per_run, count = run_length(job->blocks, job->per_run, run);
    uint8_t *codes = job->codes_out + first * job->group / 2;
    raise_to(&job->top, job->kernels->pack(job->plan, job->x + first * job->bytes, first, count, codes, job->scales_out + first));
}

uint32_t tensor_pack(const struct pack_plan *plan, const void *x, size_t blocks, uint8_t *codes, uint8_t *scales)
{
    struct block_job job = block_job_of(plan, plan->kind, plan->group, blocks);
    job.x = x;
    job.codes_out = codes;
    job.scales_out = scales;
    run_blocks(&job, pack_unit);
    return atomic_load(&job.top);
}

static void unpack_unit(void *context, size_t unit, int worker)
{
    struct block_job *job = context;
    (void)worker;
    const size_t first = unit * job->per_run, count = run_length(job->blocks, job->per_run, unit);
    const uint8_t *codes = job->codes + first * job->group / 2, *scales = job->scales + first;
    if (!scales_valid(scales, count))
        raise_to(&job->top, 1);
    job->kernels->unpack(job->plan, codes, scales, count, job->out + first * job->bytes);
}

bool tensor_unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks, void *out)
{
    struct block_job job = block_job_of(plan, plan->kind, plan->group, blocks);
    job.codes = codes;
    job.scales = scales;
    job.out = out;
    run_blocks(&job, unpack_unit);
    return atomic_load(&job.top) == 0;
}

static void fake_quant_unit(void *context, size_t unit, int worker)
{
    struct block_job *job = context;
    (void)worker;
    const size_t at = unit * job->per_run * job->bytes;
    job->kernels->fake_quant(job->plan, job->x + at, run_length(job->blocks, job->per_run, unit), job->out + at);
}

void tensor_fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out)
{
    struct block_job job = block_job_of(plan, plan->kind, plan->group, blocks);
    job.x = x;
    job.out = out;
    run_blocks(&job, fake_quant_unit);
}

struct kquant_job {
    const struct kq_kernels *kernels;
    const struct kq_type *type;
    const void *x;
    int kind;
    size_t columns, row_bytes, rows;
    const float *weight;
    uint8_t *out;
    atomic_size_t bad_row; /* the first one; `rows` if there is none */
};

/* One block at a time as floats. The row's mean square is summed in order over the whole row, as llama.cpp does. */
static void kquantize_row(void *context, size_t row, int worker)
{
    struct kquant_job *job = context;
    (void)worker;
    const struct kq_type *type = job->type;
    const float *weight = job->weight;
    const size_t start = row * job->columns;
    uint8_t *out = job->out + row * job->row_bytes;
    float v[256], row_square = 0;
    if (weight && type->block == 32) {
        for (size_t i = 0; i < job->columns; i++) {
            float f = load_as_float(job->x, job->kind, start + i);
            row_square += f * f;
        }
        row_square /= (float)job->columns;
    }
    bool finite = true;
    for (size_t at = 0; at < job->columns; at += type->block, out += type->bytes) {
        for (size_t i = 0; i < type->block; i++)
            v[i] = load_as_float(job->x, job->kind, start + at + i);
        type->encode(job->kernels, v, weight ? weight + at : NULL, row_square, out);
        finite &= kq_scales_finite(type, out);
    }
    size_t before = atomic_load(&job->bad_row);
    while (!finite && row < before && !atomic_compare_exchange_weak(&job->bad_row, &before, row))
        continue;
}

size_t tensor_kquantize(const struct kq_type *type, const void *x, int kind, size_t rows, size_t columns, const float *weight, uint8_t *out)
{
    struct kquant_job job = {.kernels = &kernels_current()->kquant,
                             .type = type,
                             .x = x,
                             .kind = kind,
                             .columns = columns,
                             .row_bytes = columns / type->block * type->bytes,
                             .rows = rows,
                             .weight = weight,
                             .out = out,
                             .bad_row = rows};
    run_units(rows, team(rows * columns), kquantize_row, &job);
    return atomic_load(&job.bad_row);
}

struct kdequant_job {
    void (*decode)(const void *raw, size_t blocks, float *out);
    const struct kq_type *type;
    const uint8_t *raw;
    size_t blocks;
    float *out;
};

static void kdequantize_unit(void *context, size_t unit, int worker)
{
    const struct kdequant_job *job = context;
    (void)worker;
    const size_t per_run = RUN / job->type->block, first = unit * per_run;
    job->decode(job->raw + first * job->type->bytes, run_length(job->blocks, per_run, unit), job->out + first * job->type->block);
}

void tensor_kdequantize(const struct kq_type *type, const uint8_t *raw, size_t blocks, float *out)
{
    struct kdequant_job job = {kernels_current()->kquant.decode[type - KQ_TYPE], type, raw, blocks, out};
    run_units(runs_of(blocks, RUN / type->block), team(blocks * type->block), kdequantize_unit, &job);
}
