/* Runs the codec's kernels on random bytes in buffers of exact size, and compares each variant with the serial one.
 *
 * It does not use Python, so that it runs with sanitizers and under qemu-user:
 *   sh tests/fuzz/codec.sh            ASan + UBSan on this processor, then aarch64 under qemu if its compiler is installed
 * Arguments: the number of executions (default 1000000); a start number of the random stream.
 */
#include "nvfp4/kquant.h"
#include "nvfp4/layout.h"
#include "nvfp4/parallel.h"
#include "nvfp4/pool.h"
#include "nvfp4/variant.h"

#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 88172645463325252u;

static uint64_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static uint8_t *random_bytes(size_t n)
{
    uint8_t *p = malloc(n ? n : 1);
    if (!p)
        exit(2);
    for (size_t i = 0; i < n; i += 8) {
        uint64_t eight = next() * 0x2545f4914f6cdd1du;
        memcpy(p + i, &eight, n - i < 8 ? n - i : 8);
    }
    return p;
}

static void must_agree(const void *a, const void *b, size_t n, const char *what, const char *variant)
{
    if (memcmp(a, b, n)) {
        printf("%s: %s differs from serial\n", what, variant);
        exit(1);
    }
}

/* A NaN's sign and payload are not defined across processors; all NaNs are equal here. */
static void one_nan(float *v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (v[i] != v[i])
            v[i] = bits_float(0x7fc00000u);
}

static void unpack_once(const struct unpack_plan *plan, const char *variant)
{
    size_t blocks = next() % 24, n = blocks * (size_t)plan->group, size = kind_size(plan->kind);
    uint8_t *codes = random_bytes(n / 2), *scales = random_bytes(blocks);
    float *a = malloc(n * 4 + 1), *b = malloc(n * 4 + 1);
    variant_set("serial");
    tensor_unpack(plan, codes, scales, blocks, a);
    variant_set(variant);
    tensor_unpack(plan, codes, scales, blocks, b);
    if (plan->kind == KIND_F32) {
        one_nan(a, n);
        one_nan(b, n);
    }
    must_agree(a, b, n * size, "unpack", variant);
    free(codes), free(scales), free(a), free(b);
}

static void pack_once(const struct pack_plan *plan, const char *variant)
{
    size_t blocks = next() % 24, n = blocks * (size_t)plan->group;
    uint8_t *x = random_bytes(n * kind_size(plan->kind));
    uint8_t *codes = random_bytes(n / 2), *scales = random_bytes(blocks);
    uint8_t *codes2 = random_bytes(n / 2), *scales2 = random_bytes(blocks);
    if (next() & 1) /* in half of the cases numbers of similar size */
        for (size_t i = 0; i < n; i++)
            store_from_float(x, plan->kind, i, (float)(int64_t)(next() % 4001 - 2000) * plan->tensor_scale * 0.25f);
    variant_set("serial");
    uint32_t top = tensor_pack(plan, x, blocks, codes, scales);
    uint32_t amax = tensor_amax(x, plan->kind, n);
    variant_set(variant);
    uint32_t top2 = tensor_pack(plan, x, blocks, codes2, scales2);
    uint32_t amax2 = tensor_amax(x, plan->kind, n);
    must_agree(&top, &amax, 4, "amax", "pack");
    must_agree(&amax, &amax2, 4, "amax", variant);
    must_agree(&top, &top2, 4, "largest", variant);
    must_agree(scales, scales2, blocks, "scales", variant);
    must_agree(codes, codes2, n / 2, "codes", variant);
    free(x), free(codes), free(scales), free(codes2), free(scales2);
}

static void kquant_decode_once(const char *variant)
{
    const struct kq_type *type = KQ_TYPE + next() % KQ_TYPES;
    size_t blocks = 1 + next() % 3, n = blocks * type->block;
    uint8_t *raw = random_bytes(blocks * type->bytes);
    float *a = malloc(n * 4), *b = malloc(n * 4);
    variant_set("serial");
    tensor_kdequantize(type, raw, blocks, a);
    variant_set(variant);
    tensor_kdequantize(type, raw, blocks, b);
    one_nan(a, n);
    one_nan(b, n);
    must_agree(a, b, n * 4, type->name, variant);
    free(raw), free(a), free(b);
}

static void kquant_encode_once(const char *variant)
{
    const struct kq_type *type = KQ_TYPE + next() % KQ_TYPES;
    size_t blocks = 1 + next() % 3, n = blocks * type->block;
    uint8_t *raw = random_bytes(blocks * type->bytes), *raw2 = random_bytes(blocks * type->bytes);
    float *x = malloc(n * 4), *weight = malloc(n * 4);
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)(int64_t)(next() % 2001 - 1000) * (float)(next() % 3) * 1e-4f;
        weight[i] = (float)(next() % 100);
    }
    const float *w = next() & 1 ? weight : NULL;
    variant_set("serial");
    tensor_kquantize(type, x, KIND_F32, 1, n, w, raw);
    variant_set(variant);
    tensor_kquantize(type, x, KIND_F32, 1, n, w, raw2);
    must_agree(raw, raw2, blocks * type->bytes, type->name, variant);
    free(raw), free(raw2), free(x), free(weight);
}

static void fake_once(const char *variant)
{
    struct fake_plan plan = {(int)(next() % 3), 16 << next() % 3, bits_float((uint32_t)(next() % 0x7f000000u))};
    size_t blocks = next() % 9, n = blocks * (size_t)plan.group;
    uint8_t *x = random_bytes(n * kind_size(plan.kind));
    uint8_t *a = random_bytes(n * 4), *b = random_bytes(n * 4);
    memcpy(b, a, n * 4);
    if (!(plan.tensor_scale > 0))
        plan.tensor_scale = 1;
    variant_set("serial");
    tensor_fake_quant(&plan, x, blocks, a);
    variant_set(variant);
    tensor_fake_quant(&plan, x, blocks, b);
    must_agree(a, b, n * kind_size(plan.kind), "fake_quant", variant);
    free(x), free(a), free(b);
}

/* All variants add in the same order, so the bits are equal, whatever the numbers. */
static void gemv_once(const char *variant)
{
    struct gemv_plan plan = {.kind = (int)(next() % 3), .group = 16 << next() % 3, .tokens = 1 + next() % 9, .rows = 1 + next() % 5};
    plan.columns = (size_t)plan.group * (1 + next() % 9);
    plan.tensor_scale = 0.001f * (float)(1 + next() % 1000);
    plan.divides = next() & 1;
    const size_t n = plan.tokens * plan.rows, weights = plan.rows * plan.columns;
    uint8_t *x = random_bytes(plan.tokens * plan.columns * kind_size(plan.kind)), *codes = random_bytes(weights / 2);
    uint8_t *scales = random_bytes(weights / (size_t)plan.group);
    for (size_t i = 0; next() % 4 && i < plan.tokens * plan.columns; i++)
        store_from_float(x, plan.kind, i, (float)(int64_t)(next() % 4001 - 2000) * 0.01f);
    float *a = malloc(n * 4), *b = malloc(n * 4);
    variant_set("serial");
    if (gemv(&plan, x, codes, scales, a) == GEMV_NO_MEMORY)
        exit(2);
    variant_set(variant);
    if (gemv(&plan, x, codes, scales, b) == GEMV_NO_MEMORY)
        exit(2);
    must_agree(a, b, n * kind_size(plan.kind), "gemv", variant);
    free(x), free(codes), free(scales), free(a), free(b);
}

static void gptq_once(const char *variant)
{
    enum { MOST_COLUMNS = 320, MOST_ROWS = 9 };
    static float factor[MOST_COLUMNS * MOST_COLUMNS], w[2][MOST_ROWS * MOST_COLUMNS], errors[MOST_ROWS * GPTQ_WINDOW];
    static uint8_t codes[2][MOST_ROWS * MOST_COLUMNS / 2], scales[2][MOST_ROWS * MOST_COLUMNS / 16];
    struct gptq_plan plan = {.codec = {.kind = KIND_F32, .group = 16 << next() % 3, .choice = next() % 4 ? CHOICE_AMAX : CHOICE_SWEEP,
                                       .tensor_scale = 0.01f, .largest_code = 448.f},
                             .rows = 1 + next() % MOST_ROWS, .factor = factor};
    plan.columns = (size_t)plan.codec.group * (1 + next() % (MOST_COLUMNS / (size_t)plan.codec.group));
    plan_prepare(&plan.codec);
    const size_t n = plan.rows * plan.columns;
    for (size_t r = 0; r < plan.columns; r++)
        for (size_t c = 0; c < plan.columns; c++)
            factor[r * plan.columns + c] = c < r ? 0.f : c == r ? 1.f : 0.001f * (float)(next() % 200);
    for (size_t i = 0; i < n; i++)
        w[0][i] = w[1][i] = 0.001f * (float)(int64_t)(next() % 4001 - 2000);
    variant_set("serial");
    const bool finite = gptq(&plan, w[0], errors, codes[0], scales[0]);
    variant_set(variant);
    if (gptq(&plan, w[1], errors, codes[1], scales[1]) != finite)
        must_agree("", "x", 1, "gptq's result", variant);
    must_agree(w[0], w[1], n * sizeof(float), "gptq's weights", variant);
    must_agree(codes[0], codes[1], n / 2, "gptq's codes", variant);
    must_agree(scales[0], scales[1], n / (size_t)plan.codec.group, "gptq's scales", variant);
}

static void layout_once(void)
{
    size_t rows = next() % (next() % 8 ? 20 : 140), columns = next() % 9, blocks = next() % 4;
    uint8_t *plain = random_bytes(rows * columns), *tiles = random_bytes(swizzled_size(rows, columns));
    uint8_t *again = random_bytes(rows * columns);
    swizzle(plain, rows, columns, tiles);
    unswizzle(tiles, rows, columns, again);
    must_agree(plain, again, rows * columns, "swizzle", "inverse");
    uint8_t *raw = random_bytes(blocks * 36), *codes = random_bytes(blocks * 32), *scales = random_bytes(blocks * 4);
    from_ggml((const struct ggml_nvfp4 *)raw, blocks, codes, scales);
    to_ggml(codes, scales, blocks, (struct ggml_nvfp4 *)raw);
    free(plain), free(tiles), free(again), free(raw), free(codes), free(scales);
}

int main(int argc, char **argv)
{
    long executions = argc > 1 ? atol(argv[1]) : 200000;
    for (long seed = argc > 2 ? atol(argv[2]) : 0; seed > 0; seed--)
        state = next() * 0x9e3779b97f4a7c15u | 1;
    const char *const *names = variant_names();
    int variants = 0;
    while (names[variants])
        variants++;
    threads_set(1);
    long decoded = 0, packed = 0, encoded = 0, others = 0;
    while (decoded + packed + encoded + others < executions) {
        struct pack_plan plan;
        struct unpack_plan back;
        memset(&plan, 0, sizeof plan);
        memset(&back, 0, sizeof back);
        plan.kind = (int)(next() % 3);
        plan.group = 16 << next() % 3;
        plan.choice = next() & 1 ? CHOICE_AMAX : next() & 1 ? CHOICE_FOUR_OVER_SIX : CHOICE_SWEEP;
        plan.encoding = (int)(next() % 3);
        plan.tensor_scale = bits_float((uint32_t)(next() % 0x7f800000u));
        if (next() & 3)
            plan.tensor_scale = 0.001f * (float)(1 + next() % 1000);
        plan.largest_code = plan.choice == CHOICE_FOUR_OVER_SIX ? 256.f : 448.f;
        plan.tensor_amax = plan.tensor_scale * 2688.f;
        back.kind = plan.kind;
        back.group = plan.group;
        back.divides = plan.encoding == ENCODING_CT;
        back.tensor_scale = plan.tensor_scale;
        plan_prepare(&plan);
        unpack_prepare(&back);
        for (int i = 0; i < 200; i++) {
            const char *variant = names[next() % (unsigned)variants];
            for (int k = 0; k < 4; k++) {
                unpack_once(&back, variant);
                kquant_decode_once(variant);
            }
            decoded += 8;
            fake_once(variant);
            layout_once();
            gemv_once(variant);
            others += 3;
            if (plan.choice == CHOICE_AMAX || i % 4 == 0) {
                pack_once(&plan, variant);
                packed++;
            }
            if (i % 16 == 0) { /* slow searches, twice */
                kquant_encode_once(variant);
                encoded++;
                if (i % 64 == 0) {
                    gptq_once(variant);
                    others++;
                }
            }
        }
    }
    printf("%ld executions (%ld decodes of random bytes, %ld packs, %ld K-quant encodes, %ld fake-quants, layouts, products and GPTQ), variants:",
           decoded + packed + encoded + others, decoded, packed, encoded, others);
    for (int i = 0; i < variants; i++)
        printf(" %s", names[i]);
    printf("\n");
    return 0;
}
