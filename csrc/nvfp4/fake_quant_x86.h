/* Fake quantization of activations for x86-64, one block at a time. Included by codec_x86.h, whose loads and conversions it uses. */
#ifndef AQ_NVFP4_FAKE_QUANT_X86_H
#define AQ_NVFP4_FAKE_QUANT_X86_H

ALWAYS_INLINE void store_floats(char *to, __m256 v, int kind)
{
    if (kind == KIND_F32) {
        _mm256_storeu_ps((float *)(void *)to, v);
    } else if (kind == KIND_F16) {
        _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    } else { /* never NaN: a step is finite and a value at most 6 */
        v256 u = _mm256_castps_si256(v), even = _mm256_and_si256(_mm256_srli_epi32(u, 16), broadcast(1));
        u = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(even, broadcast(0x7fffu))), 16);
        u = _mm256_permute4x64_epi64(_mm256_packus_epi32(u, u), 0xd8);
        _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(u));
    }
}

/* Round to the E2M1 grid, ties to even, by adding a number whose last bit is half a step of the value's binade. */
ALWAYS_INLINE __m256 round_to_grid(__m256 a)
{
    a = _mm256_min_ps(a, _mm256_set1_ps(6.f)); /* NaN gives 6 */
    __m256 binade = _mm256_and_ps(a, _mm256_castsi256_ps(broadcast(0x7f800000u)));
    __m256 addend = _mm256_mul_ps(_mm256_max_ps(binade, _mm256_set1_ps(1.f)), _mm256_set1_ps(0x1.8p22f));
    return _mm256_sub_ps(_mm256_add_ps(a, addend), addend);
}

ALWAYS_INLINE void fake_quant_blocks(const struct fake_plan *plan, int kind, int group, const char *x, size_t blocks, char *out)
{
    const size_t eight = 8 * kind_size(kind);
    const float six = 6.f * plan->tensor_scale;
    const __m256 sign = _mm256_castsi256_ps(broadcast(0x80000000u));
    for (size_t b = 0; b < blocks; b++) {
        __m256 v[MAX_GROUP / 8], top = _mm256_setzero_ps();
        for (int i = 0; i < group / 8; i++, x += eight) {
            v[i] = load_floats(x, kind);
            top = _mm256_max_ps(_mm256_andnot_ps(sign, v[i]), top); /* NaN is skipped */
        }
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
        m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
        float t = _mm_cvtss_f32(m) / six;
        float step = e4m3_to_float(e4m3_from_clamped(t < 448.f ? t : 448.f)) * plan->tensor_scale;
        __m256 steps = _mm256_set1_ps(step >= 1e-5f ? step : 1.f);
        for (int i = 0; i < group / 8; i++, out += eight) {
            __m256 q = _mm256_mul_ps(round_to_grid(_mm256_div_ps(_mm256_andnot_ps(sign, v[i]), steps)), steps);
            __m256 minus = _mm256_sub_ps(_mm256_setzero_ps(), q); /* +0.0 for zero */
            q = _mm256_blendv_ps(minus, q, _mm256_cmp_ps(v[i], _mm256_setzero_ps(), _CMP_GE_OQ));
            store_floats(out, q, kind);
        }
    }
}

ALWAYS_INLINE void fake_quant_kind(const struct fake_plan *plan, int kind, const void *x, size_t blocks, void *out)
{
    if (plan->group == 16)
        fake_quant_blocks(plan, kind, 16, x, blocks, out);
    else
        fake_quant_blocks(plan, kind, plan->group, x, blocks, out);
}

static void fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out)
{
    if (plan->kind == KIND_F32)
        fake_quant_kind(plan, KIND_F32, x, blocks, out);
    else if (plan->kind == KIND_F16)
        fake_quant_kind(plan, KIND_F16, x, blocks, out);
    else
        fake_quant_kind(plan, KIND_BF16, x, blocks, out);
}

#endif
