/* The functions that exist once per instruction set. A variant can be forced, so that tests compare each with the serial reference,
 * byte by byte. */
#ifndef AQ_NVFP4_VARIANT_H
#define AQ_NVFP4_VARIANT_H

#include "codec.h"
#include "gemv.h"
#include "gptq.h"
#include "kquant.h"

/* One variant, defined in variant_NAME.c. A function that is NULL is taken from the closest earlier variant in the table of variant.c
 * that the processor can run and that has it; the serial variant has all. */
struct kernels {
    struct codec_kernels codec;
    struct kq_kernels kquant;
    gemv_row gemv;
    gemv_steps gemv_steps;
    struct gptq_kernels gptq;
};

/* The complete functions of the variant in use: the one that was set, else the last that this processor can run. */
const struct kernels *kernels_current(void);

/* The names of the variants that this processor can run, slowest first, and NULL. */
const char *const *variant_names(void);
const char *variant_name(void);
/* name: "auto" or a variant. Returns false if this processor cannot run it. */
bool variant_set(const char *name);

#endif
