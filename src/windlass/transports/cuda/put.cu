// Pieces of a plan, stored straight into a peer's memory; and digests of what they hold.
//
// A piece is a block of rows: `rows` runs of `row_elems` elements, `src_pitch` and `dst_pitch`
// bytes apart. `pos` is where its payload begins in the link's payload, `pos_pitch` the payload
// bytes from one of its rows to the next: the digest depends on the order of all bytes, not on
// how they were cut into pieces. One block of threads works on one piece at a time.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Piece {
    u64 src, dst, src_pitch, dst_pitch, pos, pos_pitch;
    u32 rows, row_elems;
};

struct Hash {
    u64 a, b;
};

// Keep in step with windlass/memory/position_digest.py, which says why it is built this way. Its
// sums of products with a constant are products of the sums here: `settle` multiplies, once.
constexpr u64 POSITION = 0x9E3779B97F4A7C15ull;

// `salt`: the unit's position times POSITION.
__device__ __forceinline__ void absorb_salted(Hash& h, u64 value, u64 salt) {
    u64 x = value ^ salt;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93ull;
    x ^= x >> 29;
    h.a += x;
    x ^= x >> 31;
    h.b += x;
}

__device__ __forceinline__ void absorb(Hash& h, u64 value, u64 pos) {
    absorb_salted(h, value, pos * POSITION);
}

__device__ __forceinline__ void settle(Hash h, u64* out) {
    for (int step = 16; step; step >>= 1) {
        h.a += __shfl_down_sync(0xffffffffu, h.a, step);
        h.b += __shfl_down_sync(0xffffffffu, h.b, step);
    }
    if ((threadIdx.x & 31) == 0) {
        atomicAdd(out, h.a * 0xA0761D6478BD642Full);
        atomicAdd(out + 1, h.b * 0xE7037ED1A0B428DBull);
    }
}

__device__ __forceinline__ u64 join(u32 low, u32 high) { return (u64)low | ((u64)high << 32); }

// A unit of the digest is 8 bytes where a row's payload is a multiple of 8, else 4, 2 or 1.
__device__ __forceinline__ u32 unit_of(u32 row_nbytes) {
    return row_nbytes & 1 ? 1 : row_nbytes & 2 ? 2 : row_nbytes & 4 ? 4 : 8;
}

__device__ __forceinline__ u64 read_unit(const u8* p, u32 unit) {
    u64 value = 0;
    for (u32 i = 0; i < unit; i++) value |= (u64)p[i] << (8 * i);
    return value;
}

__device__ __forceinline__ void absorb16_salted(Hash& h, uint4 v, u64 salt) {
    absorb_salted(h, join(v.x, v.y), salt);
    absorb_salted(h, join(v.z, v.w), salt + 8 * POSITION);
}

__device__ __forceinline__ void absorb16(Hash& h, uint4 v, u64 pos) {
    absorb16_salted(h, v, pos * POSITION);
}

template <bool HASH>
__device__ void put_rows(const Piece& p, u32 row_nbytes, Hash& h) {
    u64 mix = p.src | p.dst | row_nbytes;
    if (p.rows > 1) mix |= p.src_pitch | p.dst_pitch;
    if ((mix & 15) == 0) {
        const u32 per_row = row_nbytes >> 4, total = per_row * p.rows, T = blockDim.x;
        for (u32 first = threadIdx.x; first < total; first += 8 * T) {
            uint4 v[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u32 i = first + k * T;
                if (i < total) {
                    u32 row = p.rows == 1 ? 0 : i / per_row, at = i - row * per_row;
                    v[k] = __ldcs((const uint4*)(p.src + row * p.src_pitch) + at);
                }
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u32 i = first + k * T;
                if (i < total) {
                    u32 row = p.rows == 1 ? 0 : i / per_row, at = i - row * per_row;
                    __stcs((uint4*)(p.dst + row * p.dst_pitch) + at, v[k]);
                    if (HASH) absorb16(h, v[k], p.pos + row * p.pos_pitch + 16ull * at);
                }
            }
        }
        return;
    }
    const u32 unit = unit_of(row_nbytes), per_row = row_nbytes / unit, total = per_row * p.rows;
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        u32 row = i / per_row, at = (i - row * per_row) * unit;
        const u8* s = (const u8*)(p.src + row * p.src_pitch) + at;
        u8* d = (u8*)(p.dst + row * p.dst_pitch) + at;
        for (u32 k = 0; k < unit; k++) d[k] = s[k];
        if (HASH) absorb(h, read_unit(s, unit), p.pos + row * p.pos_pitch + at);
    }
}

// Round to nearest even, as torch casts; a NaN becomes torch's.
__device__ __forceinline__ u16 to_bfloat16(float f) {
    u32 bits = __float_as_uint(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

__device__ __forceinline__ u16 to_float16(float f) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(f));
    return half;
}

template <int KIND>
__device__ __forceinline__ u16 narrow(float f) {
    return KIND == 0 ? to_bfloat16(f) : to_float16(f);
}

// float32 to a 2-byte float: half of the bytes that are read cross the link.
template <int KIND, bool HASH>
__device__ void put_cast(const Piece& p, Hash& h) {
    const u32 row_nbytes = p.row_elems * 2;
    u64 mix = p.src | p.dst | row_nbytes;
    if (p.rows > 1) mix |= p.src_pitch | p.dst_pitch;
    if ((mix & 15) == 0) {
        const u32 per_row = p.row_elems >> 3, total = per_row * p.rows, T = blockDim.x;
        for (u32 first = threadIdx.x; first < total; first += 4 * T) {
            float4 v[8];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 i = first + k * T;
                if (i < total) {
                    u32 row = p.rows == 1 ? 0 : i / per_row, at = i - row * per_row;
                    const float4* s = (const float4*)(p.src + row * p.src_pitch) + 2 * at;
                    v[2 * k] = __ldcs(s);
                    v[2 * k + 1] = __ldcs(s + 1);
                }
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 i = first + k * T;
                if (i < total) {
                    u32 row = p.rows == 1 ? 0 : i / per_row, at = i - row * per_row;
                    float4 x = v[2 * k], y = v[2 * k + 1];
                    uint4 packed;
                    packed.x = narrow<KIND>(x.x) | ((u32)narrow<KIND>(x.y) << 16);
                    packed.y = narrow<KIND>(x.z) | ((u32)narrow<KIND>(x.w) << 16);
                    packed.z = narrow<KIND>(y.x) | ((u32)narrow<KIND>(y.y) << 16);
                    packed.w = narrow<KIND>(y.z) | ((u32)narrow<KIND>(y.w) << 16);
                    __stcs((uint4*)(p.dst + row * p.dst_pitch) + at, packed);
                    if (HASH) absorb16(h, packed, p.pos + row * p.pos_pitch + 16ull * at);
                }
            }
        }
        return;
    }
    const u32 unit = unit_of(row_nbytes), per_row = row_nbytes / unit, total = per_row * p.rows;
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        u32 row = i / per_row, at = (i - row * per_row) * unit;
        const float* s = (const float*)(p.src + row * p.src_pitch) + at / 2;
        u16* d = (u16*)(p.dst + row * p.dst_pitch + at);
        u64 value = 0;
        for (u32 k = 0; k < unit / 2; k++) {
            d[k] = narrow<KIND>(s[k]);
            value |= (u64)d[k] << (16 * k);
        }
        if (HASH) absorb(h, value, p.pos + row * p.pos_pitch + at);
    }
}

#define PUT(NAME, BODY)                                                                        \
    extern "C" __global__ void __launch_bounds__(512) NAME(const Piece* pieces, u32 n, u64* out) { \
        Hash h = {0, 0};                                                                       \
        for (u32 i = blockIdx.x; i < n; i += gridDim.x) {                                      \
            Piece p = pieces[i];                                                               \
            BODY;                                                                              \
        }                                                                                      \
        if (out) settle(h, out);                                                               \
    }

PUT(put_1, (put_rows<false>(p, p.row_elems, h)))
PUT(put_2, (put_rows<false>(p, p.row_elems * 2, h)))
PUT(put_4, (put_rows<false>(p, p.row_elems * 4, h)))
PUT(put_8, (put_rows<false>(p, p.row_elems * 8, h)))
PUT(put_1_hashed, (put_rows<true>(p, p.row_elems, h)))
PUT(put_2_hashed, (put_rows<true>(p, p.row_elems * 2, h)))
PUT(put_4_hashed, (put_rows<true>(p, p.row_elems * 4, h)))
PUT(put_8_hashed, (put_rows<true>(p, p.row_elems * 8, h)))
PUT(put_bfloat16, (put_cast<0, false>(p, h)))
PUT(put_float16, (put_cast<1, false>(p, h)))
PUT(put_bfloat16_hashed, (put_cast<0, true>(p, h)))
PUT(put_float16_hashed, (put_cast<1, true>(p, h)))

// Block float8 (128 x 128, e4m3, one float32 scale per block), as layout/quantization.py defines it.
// A piece is one block: `src_pitch` apart at the source, values or one scale at the destination.

__device__ __forceinline__ float to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

template <bool FLOAT32>
__device__ __forceinline__ float read_weight(const Piece& p, u32 row, u32 col) {
    const u64 at = p.src + row * p.src_pitch;
    return FLOAT32 ? to_float(to_bfloat16(((const float*)at)[col])) : to_float(((const u16*)at)[col]);
}

__device__ __forceinline__ float block_max(float mine) {
    __shared__ float partial[32];
    for (int step = 16; step; step >>= 1) mine = fmaxf(mine, __shfl_xor_sync(0xffffffffu, mine, step));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = mine;
    __syncthreads();
    mine = threadIdx.x < (blockDim.x >> 5) ? partial[threadIdx.x & 31] : 0.0f;
    if (threadIdx.x < 32) {
        for (int step = 16; step; step >>= 1)
            mine = fmaxf(mine, __shfl_xor_sync(0xffffffffu, mine, step));
        if (threadIdx.x == 0) partial[0] = mine;
    }
    __syncthreads();
    return partial[0];
}

// As torch divides by a number on a GPU: by its reciprocal, which rounds differently.
__device__ __forceinline__ float scale_of(float amax) { return fmaxf(amax, 1e-4f) * (1.0f / 448.0f); }

__device__ __forceinline__ u32 to_e4m3(float f) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(f));
    return pair & 0xffu;
}

template <bool FLOAT32, bool SCALES, bool HASH>
__device__ void put_fp8(const Piece& p, Hash& h) {
    // Each thread holds its part of the block: it is read once.
    const u32 unit = unit_of(p.row_elems), per_row = p.row_elems / unit, total = per_row * p.rows;
    float held[4][8];
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 i = threadIdx.x + k * blockDim.x, row = i / per_row, at = (i - row * per_row) * unit;
        if (unit == 8 && i < total) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                held[k][j] = read_weight<FLOAT32>(p, row, at + j);
                amax = fmaxf(amax, fabsf(held[k][j]));
            }
        }
    }
    if (unit != 8)
        for (u32 i = threadIdx.x; i < p.rows * p.row_elems; i += blockDim.x)
            amax = fmaxf(amax, fabsf(read_weight<FLOAT32>(p, i / p.row_elems, i % p.row_elems)));
    const float scale = scale_of(block_max(amax));
    if (SCALES) {
        if (threadIdx.x == 0) {
            *(float*)p.dst = scale;
            if (HASH) absorb(h, __float_as_uint(scale), p.pos);
        }
        return;
    }
    const float factor = 1.0f / scale;
    if (unit == 8) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 i = threadIdx.x + k * blockDim.x, row = i / per_row, at = (i - row * per_row) * 8;
            if (i >= total) continue;
            u64 value = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) value |= (u64)to_e4m3(held[k][j] * factor) << (8 * j);
            u64 target = p.dst + row * p.dst_pitch + at;
            if (((p.dst | p.dst_pitch) & 7) == 0)
                *(u64*)target = value;
            else
                for (int j = 0; j < 8; j++) ((u8*)target)[j] = (u8)(value >> (8 * j));
            if (HASH) absorb(h, value, p.pos + row * p.pos_pitch + at);
        }
        return;
    }
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        u32 row = i / per_row, at = (i - row * per_row) * unit;
        u64 value = 0;
        for (u32 j = 0; j < unit; j++) {
            u32 bits = to_e4m3(read_weight<FLOAT32>(p, row, at + j) * factor);
            ((u8*)(p.dst + row * p.dst_pitch))[at + j] = (u8)bits;
            value |= (u64)bits << (8 * j);
        }
        if (HASH) absorb(h, value, p.pos + row * p.pos_pitch + at);
    }
}

PUT(fp8_values_bfloat16, (put_fp8<false, false, false>(p, h)))
PUT(fp8_values_float32, (put_fp8<true, false, false>(p, h)))
PUT(fp8_scales_bfloat16, (put_fp8<false, true, false>(p, h)))
PUT(fp8_scales_float32, (put_fp8<true, true, false>(p, h)))
PUT(fp8_values_bfloat16_hashed, (put_fp8<false, false, true>(p, h)))
PUT(fp8_values_float32_hashed, (put_fp8<true, false, true>(p, h)))
PUT(fp8_scales_bfloat16_hashed, (put_fp8<false, true, true>(p, h)))
PUT(fp8_scales_float32_hashed, (put_fp8<true, true, true>(p, h)))

// What lies at the destinations of the pieces, hashed where it lies. `num` vectors of 16 bytes behind
// each other; four loads of every thread are under way at once.
__device__ __forceinline__ void hash_run(const uint4* run, u32 num, u64 pos, Hash& h) {
    const u32 T = blockDim.x;
    const u64 stride = 16ull * T * POSITION;
    u64 salt = (pos + 16ull * threadIdx.x) * POSITION;
    for (u32 first = threadIdx.x; first < num; first += 4 * T) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (first + k * T < num) v[k] = __ldcs(run + first + k * T);
#pragma unroll
        for (int k = 0; k < 4; k++, salt += stride)
            if (first + k * T < num) absorb16_salted(h, v[k], salt);
    }
}

// Not inlined, so that its registers are not those of `hash_run`.
__device__ __noinline__ Hash hash_strided(const Piece* piece, u32 row_nbytes) {
    const Piece p = *piece;
    Hash h = {0, 0};
    const bool vectors = ((p.dst | row_nbytes | p.dst_pitch) & 15) == 0;
    const u32 unit = vectors ? 16 : unit_of(row_nbytes);
    const u32 per_row = row_nbytes / unit, total = per_row * p.rows;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        u32 row = i / per_row, at = (i - row * per_row) * unit;
        const u8* source = (const u8*)(p.dst + row * p.dst_pitch) + at;
        const u64 pos = p.pos + row * p.pos_pitch + at;
        if (vectors)
            absorb16(h, __ldcs((const uint4*)source), pos);
        else
            absorb(h, read_unit(source, unit), pos);
    }
    return h;
}

template <int ITEMSIZE>
__device__ __forceinline__ void hash_rows(const Piece* piece, Hash& h) {
    const u64 start = piece->dst;
    const u32 rows = piece->rows, row_nbytes = piece->row_elems * ITEMSIZE;
    const bool dense = rows == 1 || (piece->dst_pitch == row_nbytes && piece->pos_pitch == row_nbytes);
    if (dense && ((start | row_nbytes) & 15) == 0) {
        hash_run((const uint4*)start, (row_nbytes >> 4) * rows, piece->pos, h);
        return;
    }
    const Hash part = hash_strided(piece, row_nbytes);
    h.a += part.a;
    h.b += part.b;
}

// Two blocks of 512 threads to a multiprocessor: one alone waits for memory half of its time.
#define HASH(NAME, ITEMSIZE)                                                                      \
    extern "C" __global__ void __launch_bounds__(512, 2) NAME(const Piece* pieces, u32 n, u64* out) { \
        Hash h = {0, 0};                                                                          \
        for (u32 i = blockIdx.x; i < n; i += gridDim.x) hash_rows<ITEMSIZE>(pieces + i, h);        \
        settle(h, out);                                                                           \
    }

HASH(hash_1, 1)
HASH(hash_2, 2)
HASH(hash_4, 4)
HASH(hash_8, 8)
