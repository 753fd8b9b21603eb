/* The table of variants, and which one is in use. */
#include "variant.h"

#include <stdatomic.h>

/* X(name, condition): a variant and what the processor must have, slowest first. The condition is checked here, because variant_NAME.c
 * is compiled with the instructions in question. */
#if defined(__x86_64__)
#include <cpuid.h>

/* Also checks XGETBV: an operating system that does not save the registers counts as no support. */
#define HAS(feature) __builtin_cpu_supports(feature)

/* clang 14's __builtin_cpu_supports has no "f16c". F16C uses AVX registers, which the operating system saves for AVX2. */
static bool has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

#define HAS_AVX2 (HAS("avx2") && HAS("bmi2") && HAS("fma") && has_f16c())
#define VARIANTS(X)                                                                                                                        \
    X(serial, true)                                                                                                                        \
    X(avx2, HAS_AVX2)                                                                                                                      \
    X(avx512, HAS_AVX2 &&HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq"))
#elif defined(__aarch64__)
#define VARIANTS(X)                                                                                                                        \
    X(serial, true)                                                                                                                        \
    X(neon, true) /* part of the base instruction set */
#else
#define VARIANTS(X) X(serial, true)
#endif

#define DECLARE(name, condition) extern const struct kernels variant_##name;
#define COUNT(name, condition) +1
VARIANTS(DECLARE)
enum { VARIANT_COUNT = 0 VARIANTS(COUNT) };

typedef void (*function)(void);
enum { FUNCTIONS = sizeof(struct kernels) / sizeof(function) };
_Static_assert(sizeof(struct kernels) == FUNCTIONS * sizeof(function), "struct kernels has only pointers to functions");

/* What this processor can run; not changed after the module is loaded. */
static struct kernels complete[VARIANT_COUNT];
static const char *names[VARIANT_COUNT + 1];
static int available;
static atomic_int chosen;

/* Append a variant, with the functions that it lacks from the one before it. */
static void append(const char *name, const struct kernels *variant)
{
    function own[FUNCTIONS], all[FUNCTIONS];
    memcpy(own, variant, sizeof own);
    memcpy(all, complete + (available > 0 ? available - 1 : 0), sizeof all);
    for (int i = 0; i < FUNCTIONS; i++)
        all[i] = own[i] ? own[i] : all[i];
    memcpy(complete + available, all, sizeof all);
    names[available++] = name;
}

__attribute__((constructor)) static void find_variants(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
#define APPEND(name, condition)                                                                                                            \
    if (condition)                                                                                                                         \
        append(#name, &variant_##name);
    VARIANTS(APPEND)
    atomic_store(&chosen, available - 1);
}

const struct kernels *kernels_current(void)
{
    return complete + atomic_load(&chosen);
}

const char *const *variant_names(void)
{
    return names;
}

const char *variant_name(void)
{
    return names[atomic_load(&chosen)];
}

bool variant_set(const char *name)
{
    const bool fastest = strcmp(name, "auto") == 0;
    for (int i = available - 1; i >= 0; i--)
        if (fastest || strcmp(name, names[i]) == 0) {
            atomic_store(&chosen, i);
            return true;
        }
    return false;
}
