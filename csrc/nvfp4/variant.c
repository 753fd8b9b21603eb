/* The table of variants, and which one is in use. */
#include "variant.h"

#include "common/cpu.h"

#include <stdatomic.h>

static const struct variant *const KNOWN[VARIANTS] = {
    &variant_serial,
#if defined(__x86_64__)
    &variant_avx2,
    &variant_avx512,
#elif defined(__aarch64__)
    &variant_neon,
#endif
};

static int available(void)
{
    const struct cpu_features f = cpu_probe();
#if defined(__x86_64__)
    return f.avx512 ? 3 : f.avx2 ? 2 : 1;
#else
    return f.neon ? 2 : 1;
#endif
}

static atomic_int chosen = -1;

const struct variant *variant_current(void)
{
    int c = atomic_load(&chosen);
    if (c < 0) {
        c = available() - 1;
        atomic_store(&chosen, c);
    }
    return KNOWN[c];
}

int variants_available(const char *names[VARIANTS])
{
    const int n = available();
    for (int i = 0; i < n; i++)
        names[i] = KNOWN[i]->name;
    return n;
}

const char *variant_name(void)
{
    return variant_current()->name;
}

bool variant_set(const char *name)
{
    const int n = available();
    if (strcmp(name, "auto") == 0) {
        atomic_store(&chosen, n - 1);
        return true;
    }
    for (int i = 0; i < n; i++)
        if (strcmp(name, KNOWN[i]->name) == 0) {
            atomic_store(&chosen, i);
            return true;
        }
    return false;
}
