/* The CPU probe; __builtin_cpu_supports also asks XGETBV, so a kernel that does not save the registers says no. */
#include "cpu.h"

struct cpu_features cpu_probe(void)
{
    struct cpu_features f = {false, false, false};
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c") &&
             __builtin_cpu_supports("fma");
    f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#elif defined(__aarch64__)
    f.neon = true; /* part of the base instruction set */
#endif
    return f;
}
