/* The CPU probe. __builtin_cpu_supports also checks XGETBV: a kernel that does not save the registers counts as no support. */
#include "cpu.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

/* clang 14's __builtin_cpu_supports has no "f16c". F16C uses AVX registers, which the kernel saves for AVX2. */
static bool has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

struct cpu_features cpu_probe(void)
{
    struct cpu_features f = {false, false, false};
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") && has_f16c();
    f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    f.neon = true; /* part of the base instruction set */
#endif
    return f;
}
