/* CRC32 of received bytes. Tables process eight bytes a step (2 GB/s). If the processor has
 * carry-less multiplication, 64 bytes are folded a step (9 GB/s and more; Gopal and others, "Fast
 * CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009), and the
 * tables process the rest. All values are reflected: the coefficient of x^0 is the highest bit. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CRC_POLYNOMIAL 0xedb88320u

static uint32_t crc_tables[8][256];
static uint64_t crc_folding[2][2]; /* by 64 and by 16 bytes, for the low and the high half */

static uint32_t crc_step(uint32_t value) {
    return value >> 1 ^ (value & 1 ? CRC_POLYNOMIAL : 0);
}

static uint32_t crc_with_tables(uint32_t crc, const uint8_t *at, size_t size) {
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t x;
        memcpy(&x, at, 8); /* little-endian, as all of fusefs */
        x ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++, x >>= 8)
            crc ^= crc_tables[7 - i][x & 255];
    }
    for (; size; at++, size--)
        crc = crc_tables[0][(crc ^ *at) & 255] ^ crc >> 8;
    return crc;
}

#if defined(__x86_64__)
#define FOLDS __attribute__((target("pclmul,sse2")))

FOLDS static inline __m128i crc_folded(__m128i block, __m128i by, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(block, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(block, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

FOLDS static uint32_t crc_with_folding(uint32_t crc, const uint8_t *at, size_t size) {
    const __m128i *from = (const __m128i *)at;
    __m128i by = _mm_loadu_si128((const __m128i *)crc_folding[0]), lanes[4];
    uint8_t rest[16];
    for (int i = 0; i < 4; i++)
        lanes[i] = _mm_loadu_si128(from++);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)crc));
    for (size -= 64; size >= 64; size -= 64)
        for (int i = 0; i < 4; i++)
            lanes[i] = crc_folded(lanes[i], by, _mm_loadu_si128(from++));
    by = _mm_loadu_si128((const __m128i *)crc_folding[1]);
    for (int i = 1; i < 4; i++)
        lanes[0] = crc_folded(lanes[0], by, lanes[i]);
    _mm_storeu_si128((__m128i *)rest, lanes[0]);
    crc = crc_with_tables(0, rest, sizeof rest);
    return crc_with_tables(crc, (const uint8_t *)from, size);
}
#endif

/* Returns the CRC32 of `data`, continuing from `crc`, that of the data before (0: none). */
static uint32_t crc32_of(uint32_t crc, const void *data, size_t size) {
#if defined(__x86_64__)
    if (size >= 64 && __builtin_cpu_supports("pclmul"))
        return ~crc_with_folding(~crc, data, size);
#endif
    return ~crc_with_tables(~crc, data, size);
}

/* Makes the tables; must be called once, before any other function. */
static void crc_prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++)
            value = crc_step(value);
        crc_tables[0][byte] = value;
    }
    for (int i = 1; i < 8; i++)
        for (int byte = 0; byte < 256; byte++)
            crc_tables[i][byte] = crc_with_tables(crc_tables[i - 1][byte], (uint8_t[1]){0}, 1);
    /* x^n modulo the polynomial, with n one less than the distance: the product of two reflected
     * numbers of 64 bits lacks a bit. */
    for (int i = 0; i < 4; i++) {
        uint32_t value = 1u << 31;
        for (int n = (i < 2 ? 512 : 128) + (i % 2 ? 0 : 64) - 1; n; n--)
            value = crc_step(value);
        crc_folding[i / 2][i % 2] = (uint64_t)value << 32;
    }
}
