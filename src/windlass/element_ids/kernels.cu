// What capture does with every element of a model, each in one pass over the GPU's memory. In step with the same
// in torch: `memory.fingerprint`, `codes._ordinary`, `ElementIds.check`. One kernel works on one tensor.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr u64 WEIGHT = 0xBF58476D1CE4E5B9ull, STEP = 0x94D049BB133111EBull;

// Shifts of signed numbers, as torch's.
__device__ __forceinline__ u64 mixed(u64 word, u64 place) {
    u64 x = (word + 1) * WEIGHT + place * STEP;
    x = (x ^ (u64)((i64)x >> 29)) * STEP;
    return x ^ (u64)((i64)x >> 32);
}

// A number between 0 and 2^24.
__device__ __forceinline__ u32 bits24(u64 number, u32 seed) {
    u32 x = ((u32)number ^ (u32)(number >> 32) * 0x9E3779B1u) + seed;
    x = (x ^ (u32)((int)x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (u32)((int)x >> 13)) * 0xC2B2AE35u;
    return ((x ^ (u32)((int)x >> 16)) >> 4) & 0xFFFFFFu;
}

// The value of an element, as bits of its type: of float32, or rounded to bfloat16.
template <typename BITS>
__device__ __forceinline__ BITS ordinary(u64 number, u32 seed) {
    const u32 bits = __float_as_uint((float)((int)bits24(number, seed) - (1 << 23)) * (1.0f / (1 << 26)));
    return (BITS)(sizeof(BITS) == 4 ? bits : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Adds the values of all threads to `out`; every thread calls it.
__device__ __forceinline__ void add(u64 value, u64* out) {
    for (int step = 16; step; step >>= 1) value += __shfl_down_sync(0xFFFFFFFFu, value, step);
    if ((threadIdx.x & 31) == 0 && value) atomicAdd(out, value);
}

#define EACH(i, n) \
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (u64)gridDim.x * blockDim.x

extern "C" __global__ void fingerprint(const u64* words, u64 n, u64* out) {
    u64 sum = 0;
    for (EACH(i, n)) sum += mixed(words[i], i);
    add(sum, out);
}

template <typename BITS>
__device__ void fill(BITS* out, u64 n, u64 first, u32 seed) {
    for (EACH(i, n)) out[i] = ordinary<BITS>(first + i, seed);
}

// Element `heads[row] + patterns[group][column]` is to lie at each place; negative numbers are none. `out`: how many
// places hold another, a fingerprint of the places where none is to lie, how many are to hold one, and how many none.
template <typename BITS>
__device__ void check(const BITS* memory, const i64* heads, const i64* patterns, u32 n, u32 rows, u32 width,
                      i64 end, u32 seed, u64* out) {
    u64 wrong = 0, padding = 0, held = 0, empty = 0;
    for (EACH(i, n)) {
        const u32 place = (u32)i, row = place / width, column = place - row * width;
        const i64 head = heads[row];
        const i64 number = head < 0 ? head : head + patterns[(u64)(row / rows) * width + column];
        if (number < 0) {
            empty++;
            padding += mixed((u64)(i64)memory[i], i);
        } else {
            held++;
            wrong += number >= end || memory[i] != ordinary<BITS>((u64)number, seed);
        }
    }
    add(wrong, out);
    add(padding, out + 1);
    add(held, out + 2);
    add(empty, out + 3);
}

#define OF_TYPE(name, BITS)                                                                                  \
    extern "C" __global__ void fill_##name(BITS* out, u64 n, u64 first, u32 seed) {                          \
        fill(out, n, first, seed);                                                                           \
    }                                                                                                        \
    extern "C" __global__ void check_##name(const BITS* memory, const i64* heads, const i64* patterns,       \
                                            u32 n, u32 rows, u32 width, i64 end, u32 seed, u64* out) {       \
        check(memory, heads, patterns, n, rows, width, end, seed, out);                                      \
    }
OF_TYPE(bfloat16, short)
OF_TYPE(float32, int)
