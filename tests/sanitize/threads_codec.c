/* The codec in threads, for ThreadSanitizer: four callers at once, of which one has the workers, while a fifth thread changes the variant
 * and the number of threads. Every result must equal that of a single caller.
 *
 * Built and run by `make tsan`. Argument: rounds (10).
 */
#include "nvfp4/gemv.h"
#include "nvfp4/gptq.h"
#include "nvfp4/kquant.h"
#include "nvfp4/parallel.h"
#include "nvfp4/pool.h"
#include "nvfp4/variant.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { CALLERS = 4, COLUMNS = 512, ROWS = 600, N = ROWS * COLUMNS, GROUP = 16, TOKENS = 3 };

struct results {
    uint8_t codes[N / 2], scales[N / GROUP];
    float unpacked[N], faked[N], restored[N], rounded[N], y[TOKENS * ROWS];
    uint8_t kquant[N]; /* Q8_0: 34 bytes of 32 */
    uint8_t gptq_codes[N / 2], gptq_scales[N / GROUP];
    uint32_t amax;
};

#define PART(field)                                                                                                                        \
    {                                                                                                                                      \
#field, offsetof(struct results, field), sizeof((struct results *)0)->field                                                        \
    }
static const struct {
    const char *name;
    size_t at, size;
} PARTS[] = {PART(codes),  PART(scales),     PART(unpacked),    PART(faked), PART(restored), PART(rounded),
             PART(kquant), PART(gptq_codes), PART(gptq_scales), PART(amax),  PART(y)};

struct caller {
    pthread_t thread;
    float x[N];
    struct results alone, among;
};

static int rounds = 10;
static atomic_int over;
static float factor[COLUMNS * COLUMNS]; /* of GPTQ: upper triangular */

static void work(const float *x, struct results *r)
{
    struct pack_plan plan = {.kind = KIND_F32, .group = GROUP, .tensor_scale = 0.01f, .largest_code = 448.f};
    struct unpack_plan back = {.kind = KIND_F32, .group = GROUP, .tensor_scale = 0.01f};
    struct fake_plan fake = {KIND_F32, GROUP, 0.01f};
    struct gemv_plan product = {
        .kind = KIND_F32, .group = GROUP, .tokens = TOKENS, .rows = ROWS, .columns = COLUMNS, .tensor_scale = 0.01f};
    plan_prepare(&plan);
    unpack_prepare(&back);
    r->amax = tensor_amax(x, KIND_F32, N);
    tensor_pack(&plan, x, N / GROUP, r->codes, r->scales);
    tensor_unpack(&back, r->codes, r->scales, N / GROUP, r->unpacked);
    tensor_fake_quant(&fake, x, N / GROUP, r->faked);
    const struct kq_type *type = KQ_TYPE; /* its block is 256 columns or 32: both divide COLUMNS */
    tensor_kquantize(type, x, KIND_F32, ROWS, COLUMNS, NULL, r->kquant);
    tensor_kdequantize(type, r->kquant, N / type->block, r->restored);
    if (gemv(&product, x, r->codes, r->scales, r->y) != GEMV_DONE)
        exit(2);
    struct gptq_plan feedback = {.codec = plan, .rows = ROWS, .columns = COLUMNS, .factor = factor};
    memcpy(r->rounded, x, sizeof r->rounded);
    float *errors = malloc(ROWS * GPTQ_WINDOW * sizeof *errors);
    if (!errors || !gptq(&feedback, r->rounded, errors, r->gptq_codes, r->gptq_scales))
        exit(2);
    free(errors);
}

static void broken(const char *what)
{
    printf("%s changed under threads\n", what);
    fflush(stdout);
    _exit(1); /* other callers' teams are at work */
}

static void compare(const struct caller *c)
{
    for (size_t p = 0; p < sizeof PARTS / sizeof *PARTS; p++)
        if (memcmp((const char *)&c->alone + PARTS[p].at, (const char *)&c->among + PARTS[p].at, PARTS[p].size))
            broken(PARTS[p].name);
}

static void *call(void *context)
{
    struct caller *c = context;
    for (int i = 0; i < rounds; i++) {
        memset(&c->among, 0, sizeof c->among);
        work(c->x, &c->among);
        compare(c);
    }
    return NULL;
}

static void *change_settings(void *unused)
{
    const char *const *name = variant_names();
    for (int i = 0; !atomic_load(&over); i++) {
        name = *name ? name : variant_names();
        variant_set(*name++);
        threads_set(i % 4);
        (void)variant_name();
        (void)threads_get();
    }
    return unused;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        rounds = atoi(argv[1]);
    struct caller *callers = calloc(CALLERS, sizeof *callers);
    pthread_t settings;
    if (!callers)
        return 2;
    variant_set("serial");
    for (int r = 0; r < COLUMNS; r++)
        for (int c = r; c < COLUMNS; c++)
            factor[r * COLUMNS + c] = c == r ? 1.f : 1e-3f * (float)((r + c) % 7);
    for (int c = 0; c < CALLERS; c++) {
        for (int i = 0; i < N; i++)
            callers[c].x[i] = (float)((int)(((unsigned)i * 7919u + (unsigned)c * 31u) % 2001u) - 1000) * 0.01f;
        work(callers[c].x, &callers[c].alone);
    }
    pthread_create(&settings, NULL, change_settings, NULL);
    for (int c = 0; c < CALLERS; c++)
        pthread_create(&callers[c].thread, NULL, call, &callers[c]);
    for (int c = 0; c < CALLERS; c++)
        pthread_join(callers[c].thread, NULL);
    atomic_store(&over, 1);
    pthread_join(settings, NULL);
    printf("codec: %d callers, %d rounds each, all results as alone\n", CALLERS, rounds);
    free(callers);
    return 0;
}
