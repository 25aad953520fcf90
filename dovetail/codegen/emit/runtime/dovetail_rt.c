/* What happens on failure, and the few library functions compilers call by themselves, so that no C library is linked. */
#include "dovetail_rt.h"

#ifdef DOVETAIL_HOST

/* The first failure, for whoever loads the library; null while there is none. */
extern const char *dovetail_failure;
extern int32_t dovetail_failure_status;
const char *dovetail_failure;
int32_t dovetail_failure_status;

__attribute__((weak)) void dovetail_failed(const char *what, int32_t status)
{
    if (dovetail_failure == 0) {
        dovetail_failure = what;
        dovetail_failure_status = status;
    }
}

#else

#include <stddef.h>

void dovetail_halt(void);

__attribute__((weak)) void dovetail_failed(const char *what, int32_t status)
{
#ifdef DOVETAIL_SIM
    dovetail_mmio_write(DOVETAIL_SIM_STATUS, (uint32_t)status);
    dovetail_mmio_write(DOVETAIL_SIM_FAILED, (uint32_t)(uintptr_t)what);
#else
    (void)what;
    (void)status;
#endif
    dovetail_halt();
}

/* Compilers recognise these loops and would replace them by calls to the very functions defined here. */
#if defined(__clang__)
#define PLAIN_LOOPS __attribute__((no_builtin))
#elif defined(__GNUC__)
#define PLAIN_LOOPS __attribute__((optimize("no-tree-loop-distribute-patterns")))
#else
#define PLAIN_LOOPS
#endif

/* Words seen through other types. */
typedef uint32_t __attribute__((may_alias)) word;

void *memcpy(void *restrict target, const void *restrict source, size_t bytes);
void *memmove(void *target, const void *source, size_t bytes);
void *memset(void *target, int value, size_t bytes);

/* Arm compilers call some of them by the names of the run-time ABI for the Arm architecture. */
#if defined(__ARM_EABI__)
#define ALSO(name) __attribute__((alias(name)))
void *__aeabi_memcpy(void *restrict target, const void *restrict source, size_t bytes) ALSO("memcpy");
void *__aeabi_memcpy4(void *restrict target, const void *restrict source, size_t bytes) ALSO("memcpy");
void *__aeabi_memcpy8(void *restrict target, const void *restrict source, size_t bytes) ALSO("memcpy");
void *__aeabi_memmove(void *target, const void *source, size_t bytes) ALSO("memmove");
void *__aeabi_memmove4(void *target, const void *source, size_t bytes) ALSO("memmove");
void *__aeabi_memmove8(void *target, const void *source, size_t bytes) ALSO("memmove");
void __aeabi_memset(void *target, size_t bytes, int value);
void __aeabi_memset4(void *target, size_t bytes, int value) ALSO("__aeabi_memset");
void __aeabi_memset8(void *target, size_t bytes, int value) ALSO("__aeabi_memset");
void __aeabi_memclr(void *target, size_t bytes);
void __aeabi_memclr4(void *target, size_t bytes) ALSO("__aeabi_memclr");
void __aeabi_memclr8(void *target, size_t bytes) ALSO("__aeabi_memclr");

void __aeabi_memset(void *target, size_t bytes, int value)
{
    (void)memset(target, value, bytes);
}

void __aeabi_memclr(void *target, size_t bytes)
{
    (void)memset(target, 0, bytes);
}
#endif

PLAIN_LOOPS void *memcpy(void *restrict target, const void *restrict source, size_t bytes)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    if ((((uintptr_t)to ^ (uintptr_t)from) & 3u) == 0u) {
        for (; bytes != 0u && ((uintptr_t)to & 3u) != 0u; bytes--) {
            *to++ = *from++;
        }
        for (; bytes >= 16u; bytes -= 16u, to += 16, from += 16) {
            const word *w = (const word *)(const void *)from;
            word *v = (word *)(void *)to;
            const uint32_t a = w[0], b = w[1], c = w[2], d = w[3];
            v[0] = a;
            v[1] = b;
            v[2] = c;
            v[3] = d;
        }
        for (; bytes >= 4u; bytes -= 4u, to += 4, from += 4) {
            *(word *)(void *)to = *(const word *)(const void *)from;
        }
    }
    for (; bytes != 0u; bytes--) {
        *to++ = *from++;
    }
    return target;
}

PLAIN_LOOPS void *memmove(void *target, const void *source, size_t bytes)
{
    unsigned char *to = target;
    const unsigned char *from = source;
    if ((uintptr_t)to - (uintptr_t)from >= bytes) { /* target before source, or apart */
        for (; bytes != 0u; bytes--) {
            *to++ = *from++;
        }
        return target;
    }
    for (; bytes != 0u; bytes--) {
        to[bytes - 1u] = from[bytes - 1u];
    }
    return target;
}

PLAIN_LOOPS void *memset(void *target, int value, size_t bytes)
{
    unsigned char *to = target;
    const uint32_t four = (uint32_t)(unsigned char)value * 0x01010101u;
    for (; bytes != 0u && ((uintptr_t)to & 3u) != 0u; bytes--) {
        *to++ = (unsigned char)value;
    }
    for (; bytes >= 4u; bytes -= 4u, to += 4) {
        *(word *)(void *)to = four;
    }
    for (; bytes != 0u; bytes--) {
        *to++ = (unsigned char)value;
    }
    return target;
}

/* GCC brings its own in libgcc; Arm cores without a product of 64 bits are linked with the compiler's library. */
#if (!defined(__GNUC__) || defined(__clang__)) && !(defined(__ARM_EABI__) && __ARM_ARCH_ISA_THUMB == 1)

int64_t __divdi3(int64_t a, int64_t b);
int64_t __moddi3(int64_t a, int64_t b);
uint64_t __udivdi3(uint64_t a, uint64_t b);
uint64_t __umoddi3(uint64_t a, uint64_t b);
uint64_t __ashldi3(uint64_t value, int shift);
uint64_t __lshrdi3(uint64_t value, int shift);
int64_t __ashrdi3(int64_t value, int shift);
uint64_t __muldi3(uint64_t a, uint64_t b);

#if defined(__ARM_EABI__)
uint64_t __aeabi_llsl(uint64_t value, int shift) ALSO("__ashldi3");
uint64_t __aeabi_llsr(uint64_t value, int shift) ALSO("__lshrdi3");
int64_t __aeabi_lasr(int64_t value, int shift) ALSO("__ashrdi3");
uint64_t __aeabi_lmul(uint64_t a, uint64_t b) ALSO("__muldi3");
#endif

static uint64_t join(uint32_t high, uint32_t low)
{
    return (uint64_t)high << 32 | low;
}

uint64_t __ashldi3(uint64_t value, int shift)
{
    const uint32_t high = (uint32_t)(value >> 32), low = (uint32_t)value;
    if (shift >= 32) {
        return join(low << (shift - 32), 0u);
    }
    return shift == 0 ? value : join(high << shift | low >> (32 - shift), low << shift);
}

uint64_t __lshrdi3(uint64_t value, int shift)
{
    const uint32_t high = (uint32_t)(value >> 32), low = (uint32_t)value;
    if (shift >= 32) {
        return join(0u, high >> (shift - 32));
    }
    return shift == 0 ? value : join(high >> shift, low >> shift | high << (32 - shift));
}

int64_t __ashrdi3(int64_t value, int shift)
{
    const uint64_t moved = __lshrdi3((uint64_t)value, shift);
    return (int64_t)(value < 0 && shift != 0 ? moved | __ashldi3(~(uint64_t)0, 64 - shift) : moved);
}

uint64_t __muldi3(uint64_t a, uint64_t b)
{
    const uint32_t cross = (uint32_t)(a >> 32) * (uint32_t)b + (uint32_t)a * (uint32_t)(b >> 32);
    return (uint64_t)(uint32_t)a * (uint32_t)b + join(cross, 0u);
}

/* Schoolbook division, a bit at a time; divides by zero to all ones, like the hardware's 32-bit division. */
static uint64_t divide(uint64_t a, uint64_t b, uint64_t *remainder)
{
    uint64_t quotient = 0, rest = 0;
    for (int bit = 63; bit >= 0; bit--) {
        const uint64_t carry = rest >> 63;
        rest = rest << 1 | (a >> 63);
        a <<= 1;
        quotient <<= 1;
        if (carry != 0u || rest >= b) {
            rest -= b;
            quotient |= 1u;
        }
    }
    *remainder = rest;
    return quotient;
}

static uint64_t magnitude(int64_t value)
{
    return value < 0 ? 0u - (uint64_t)value : (uint64_t)value;
}

uint64_t __udivdi3(uint64_t a, uint64_t b)
{
    uint64_t rest;
    return divide(a, b, &rest);
}

uint64_t __umoddi3(uint64_t a, uint64_t b)
{
    uint64_t rest;
    (void)divide(a, b, &rest);
    return rest;
}

int64_t __divdi3(int64_t a, int64_t b)
{
    uint64_t rest;
    const uint64_t quotient = divide(magnitude(a), magnitude(b), &rest);
    return (int64_t)((a < 0) != (b < 0) ? 0u - quotient : quotient);
}

int64_t __moddi3(int64_t a, int64_t b)
{
    uint64_t rest;
    (void)divide(magnitude(a), magnitude(b), &rest);
    return (int64_t)(a < 0 ? 0u - rest : rest);
}

#if defined(__ARM_EABI__) /* called by the division of cortex_m_start.S */

uint64_t dovetail_divide_unsigned(uint64_t a, uint64_t b, uint64_t *remainder);
int64_t dovetail_divide_signed(int64_t a, int64_t b, int64_t *remainder);

uint64_t dovetail_divide_unsigned(uint64_t a, uint64_t b, uint64_t *remainder)
{
    return divide(a, b, remainder);
}

int64_t dovetail_divide_signed(int64_t a, int64_t b, int64_t *remainder)
{
    uint64_t rest;
    const uint64_t quotient = divide(magnitude(a), magnitude(b), &rest);
    *remainder = (int64_t)(a < 0 ? 0u - rest : rest);
    return (int64_t)((a < 0) != (b < 0) ? 0u - quotient : quotient);
}

#endif
#endif
#endif
