/* One table of variants: all functions that exist once per instruction set. A variant can be forced, so that tests compare each with
 * the serial reference, byte by byte. */
#ifndef AQ_NVFP4_VARIANT_H
#define AQ_NVFP4_VARIANT_H

#include "codec.h"
#include "gemv.h"
#include "gptq.h"
#include "kquant.h"

struct variant {
    const char *name;
    const struct codec_kernels *codec;
    const struct kq_search *kquant;
    gemv_row gemv;
    const struct gptq_kernels *gptq;
};

extern const struct variant variant_serial;
#if defined(__x86_64__)
extern const struct variant variant_avx2, variant_avx512;
#elif defined(__aarch64__)
extern const struct variant variant_neon;
#endif

#define VARIANTS 3

/* The variant in use: the one that was set, else the fastest that this processor can run. */
const struct variant *variant_current(void);

/* Set `names` to the variants that this processor can run, slowest first. Returns their number. */
int variants_available(const char *names[VARIANTS]);
const char *variant_name(void);
/* name: "auto" or a variant. Returns false if this processor cannot run it. */
bool variant_set(const char *name);

#endif
