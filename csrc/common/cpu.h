/* The SIMD variants that this processor can run. */
#ifndef AQ_COMMON_CPU_H
#define AQ_COMMON_CPU_H

#include <stdbool.h>

struct cpu_features {
    bool avx2;   /* AVX2, FMA, F16C and BMI2, with the operating system saving the registers */
    bool avx512; /* AVX-512 F, BW, VL, DQ */
    bool neon;
};

struct cpu_features cpu_probe(void);

#endif
