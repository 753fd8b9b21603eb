/* A digest of what each operation of the codec gives, for tests/perf/compare_codec_bytes.sh: VARIANT. */
#include "nvfp4/gemv.h"
#include "nvfp4/gptq.h"
#include "nvfp4/layout.h"
#include "nvfp4/parallel.h"
#include "nvfp4/variant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 70, COLUMNS = 256, COUNT = ROWS * COLUMNS, PATTERNS = 6 };

static uint64_t state = 88172645463325252u;

static uint64_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Sums of uniform numbers, nearly Gaussian. */
static float normal(void)
{
    float sum = 0;
    for (int i = 0; i < 8; i++)
        sum += (float)(next() >> 40) * 0x1p-24f - 0.5f;
    return sum;
}

/* Weights of a model; small integers, so that many elements and errors are ties; a wide range; denormals; blocks of zeros; any bits. */
static void fill(float *x, int pattern)
{
    for (int i = 0; i < COUNT; i++) {
        const float v = normal();
        switch (pattern) {
        case 0:
            x[i] = 0.03f * v;
            break;
        case 1:
            x[i] = 0.25f * roundf(8 * v);
            break;
        case 2:
            x[i] = ldexpf(v, (int)(next() % 40) - 20);
            break;
        case 3:
            x[i] = v * 0x1p-140f;
            break;
        case 4:
            x[i] = i / 48 % 3 ? 0.f : v;
            break;
        default:
            x[i] = bits_float((uint32_t)next());
            break;
        }
    }
}

static uint64_t fnv(uint64_t digest, const void *data, size_t size)
{
    for (size_t i = 0; i < size; i++)
        digest = (digest ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    return digest;
}

static void print(const char *what, int pattern, int kind, uint64_t digest)
{
    printf("%s, pattern %d, kind %d: %016llx\n", what, pattern, kind, (unsigned long long)digest);
}

static void formats(const void *x, int pattern, int kind, const float *weight, uint8_t *codes, uint8_t *scales, float *out)
{
    char what[96];
    for (int group = 16; group <= 64; group *= 2)
        for (int choice = 0; choice < 3; choice++)
            for (int encoding = 0; encoding < 3; encoding++)
                for (int weighted = 0; weighted < 2; weighted++) {
                    struct pack_plan *plan = aligned_alloc(64, (sizeof *plan + 63) / 64 * 64);
                    if (!plan)
                        exit(2);
                    *plan = (struct pack_plan){.kind = kind,
                                               .group = group,
                                               .choice = choice,
                                               .encoding = encoding,
                                               .tensor_scale = encoding == ENCODING_CT ? 300.f : 0.003f,
                                               .largest_code = choice == CHOICE_FOUR_OVER_SIX ? 256.f : 448.f,
                                               .tensor_amax = 8.f,
                                               .weight = weighted ? weight : NULL,
                                               .columns = COLUMNS};
                    const size_t blocks = COUNT / (size_t)group;
                    plan_prepare(plan);
                    uint32_t top = tensor_pack(plan, x, blocks, codes, scales);
                    uint64_t digest = fnv(fnv(fnv(1, &top, sizeof top), codes, COUNT / 2), scales, blocks);
                    for (int to = 0; to < 3; to++) {
                        struct unpack_plan back = {
                            .kind = to, .group = group, .divides = encoding == ENCODING_CT, .tensor_scale = plan->tensor_scale};
                        unpack_prepare(&back);
                        tensor_unpack(&back, codes, scales, blocks, out);
                        digest = fnv(digest, out, COUNT * kind_size(to));
                    }
                    snprintf(what, sizeof what, "pack and unpack, group %d, choice %d, encoding %d, weighted %d", group, choice, encoding,
                             weighted);
                    print(what, pattern, kind, digest);
                    free(plan);
                }
    for (int group = 16; group <= 64; group *= 2) {
        const struct fake_plan fake = {kind, group, 0.003f};
        tensor_fake_quant(&fake, x, COUNT / (size_t)group, out);
        snprintf(what, sizeof what, "fake_quant, group %d", group);
        print(what, pattern, kind, fnv(1, out, COUNT * kind_size(kind)));
    }
    for (const struct kq_type *type = KQ_TYPE; type < KQ_TYPE + KQ_TYPES; type++)
        for (int weighted = 0; weighted < 2; weighted++) {
            const size_t blocks = COUNT / type->block;
            tensor_kquantize(type, x, kind, ROWS, COLUMNS, weighted ? weight : NULL, codes);
            tensor_kdequantize(type, codes, blocks, out);
            snprintf(what, sizeof what, "%s, weighted %d", type->name, weighted);
            print(what, pattern, kind, fnv(fnv(1, codes, blocks * type->bytes), out, COUNT * sizeof *out));
        }
}

static void products(const void *x, int kind, int pattern, uint8_t *codes, uint8_t *scales)
{
    char what[64];
    float y[7 * ROWS];
    for (size_t i = 0; i < COUNT; i++)
        codes[i / 2] = (uint8_t)next(), scales[i / 16] = (uint8_t)(next() % 127);
    for (size_t tokens = 1; tokens <= 7; tokens++) {
        struct gemv_plan plan = {.kind = kind, .group = 16, .tokens = tokens, .rows = ROWS, .columns = COLUMNS - 16 * (tokens % 2), .tensor_scale = 0.01f};
        gemv(&plan, x, codes, scales, y);
        snprintf(what, sizeof what, "gemv, %zu rows of x", tokens);
        print(what, pattern, kind, fnv(1, y, tokens * ROWS * kind_size(kind)));
    }
}

static void feedback(const float *x, int pattern, const float *weight, float *w, uint8_t *codes, uint8_t *scales)
{
    static float factor[COLUMNS * COLUMNS], errors[ROWS * GPTQ_WINDOW];
    for (int r = 0; r < COLUMNS; r++)
        for (int c = r; c < COLUMNS; c++)
            factor[r * COLUMNS + c] = c == r ? 1.f : 1e-3f * (float)((r + c) % 7 - 3);
    for (int weighted = 0; weighted < 2; weighted++) {
        struct gptq_plan *plan = aligned_alloc(64, (sizeof *plan + 63) / 64 * 64);
        if (!plan)
            exit(2);
        *plan = (struct gptq_plan){.codec = {.group = 16,
                                             .choice = CHOICE_SWEEP,
                                             .tensor_scale = 0.003f,
                                             .largest_code = 448.f,
                                             .weight = weighted ? weight : NULL,
                                             .columns = COLUMNS},
                                   .rows = ROWS,
                                   .columns = COLUMNS,
                                   .factor = factor};
        plan_prepare(&plan->codec);
        memcpy(w, x, COUNT * sizeof *w);
        const int status = gptq(plan, w, errors, codes, scales);
        print(weighted ? "gptq, weighted" : "gptq", pattern, KIND_F32,
              fnv(fnv(fnv(fnv(1, &status, sizeof status), w, COUNT * sizeof *w), codes, COUNT / 2), scales, COUNT / 16));
        free(plan);
    }
}

int main(int argc, char **argv)
{
    if (argc != 2 || !variant_set(argv[1]))
        return 2;
    float *x = malloc(COUNT * sizeof *x), *out = malloc(COUNT * sizeof *out), weight[COLUMNS];
    uint16_t *half = malloc(COUNT * sizeof *half);
    uint8_t *codes = malloc(COUNT * 2), *scales = malloc(COUNT);
    if (!x || !out || !half || !codes || !scales)
        return 2;
    for (int i = 0; i < COLUMNS; i++)
        weight[i] = fabsf(normal()) + 0.01f;
    for (int pattern = 0; pattern < PATTERNS; pattern++) {
        fill(x, pattern);
        if (pattern < PATTERNS - 1)
            feedback(x, pattern, weight, out, codes, scales);
        for (int kind = 0; kind < 3; kind++) {
            for (size_t i = 0; kind != KIND_F32 && i < COUNT; i++)
                store_from_float(half, kind, i, x[i]);
            const void *input = kind == KIND_F32 ? (const void *)x : half;
            const uint32_t top = tensor_amax(input, kind, COUNT - 5);
            print("amax", pattern, kind, fnv(1, &top, sizeof top));
            formats(input, pattern, kind, weight, codes, scales, out);
            if (pattern < PATTERNS - 1)
                products(input, kind, pattern, codes, scales);
        }
    }
    free(x), free(out), free(half), free(codes), free(scales);
    return 0;
}
