/* One operation of the codec on bf16 blocks, for tests/perf/codec_instructions.sh: VARIANT OPERATION BLOCKS. */
#include "nvfp4/parallel.h"
#include "nvfp4/variant.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    enum { COLUMNS = 1024 };
    if (argc != 4 || !variant_set(argv[1]))
        return 2;
    threads_set(1);
    const char *operation = argv[2];
    const size_t blocks = (size_t)atol(argv[3]), n = 16 * blocks;
    uint16_t *x = malloc(2 * n), *out = malloc(2 * n), y[4 * 4096];
    uint8_t *codes = malloc(n / 2), *scales = malloc(blocks);
    uint32_t state = 12345;
    /* Filled by copies, so that the work grows little with the number of blocks; sums of uniform numbers, nearly Gaussian. */
    uint16_t sample[4096];
    for (int i = 0; i < 4096; i++) {
        float v = 0;
        for (int k = 0; k < 8; k++) {
            state = state * 1664525u + 1013904223u;
            v += (float)(state >> 8) * 0x1p-24f - 0.5f;
        }
        sample[i] = float_to_bf16(v * 0.025f);
    }
    for (size_t i = 0; i < n; i++)
        x[i] = sample[i % 4096];
    struct pack_plan plan = {.kind = KIND_BF16, .group = 16, .tensor_scale = 0.1f / 2688, .largest_code = 448.f};
    struct unpack_plan back = {.kind = KIND_BF16, .group = 16, .tensor_scale = plan.tensor_scale};
    struct fake_plan fake = {KIND_BF16, 16, plan.tensor_scale};
    struct gemv_plan product = {.kind = KIND_BF16, .group = 16, .tokens = (size_t)(operation[4] - '0'), .columns = COLUMNS, .tensor_scale = plan.tensor_scale};
    plan.choice = strcmp(operation, "sweep") == 0 ? CHOICE_SWEEP : strcmp(operation, "four_over_six") == 0 ? CHOICE_FOUR_OVER_SIX : CHOICE_AMAX;
    plan_prepare(&plan);
    unpack_prepare(&back);
    product.rows = n / COLUMNS;
    memset(codes, 0x35, n / 2);
    memset(scales, 0x60, blocks);
    memset(out, 0, 2 * n);
    if (strcmp(operation, "pack") == 0 || plan.choice != CHOICE_AMAX)
        tensor_pack(&plan, x, blocks, codes, scales);
    else if (strcmp(operation, "amax") == 0)
        tensor_amax(x, KIND_BF16, n);
    else if (strcmp(operation, "unpack") == 0)
        tensor_unpack(&back, codes, scales, blocks, out);
    else if (strcmp(operation, "fake_quant") == 0)
        tensor_fake_quant(&fake, x, blocks, out);
    else if (strncmp(operation, "gemv", 4) == 0)
        return gemv(&product, x, codes, scales, y) != GEMV_DONE;
    else
        return strcmp(operation, "nothing") != 0;
    return 0;
}
