// Moves of cache rows and blocks: bytes only.
#include "simd.h"

namespace vllm_native {
namespace VLLM_ISA {

void write_kv(const WriteKvArgs& a, int64_t begin, int64_t end) {
  const size_t key_bytes = size_t(a.key_dim * a.item_size);
  const size_t value_bytes = size_t(a.value_dim * a.item_size);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = a.slots[token];
    if (slot < a.block_size) continue;  // nothing to write, or the null block
    const int64_t block = slot / a.block_size;
    char* row = a.pages + block * a.block_stride_bytes + (slot - block * a.block_size) * a.row_stride_bytes;
    const char* key = a.key + token * a.key_token_stride_bytes;
    const char* value = a.value + token * a.value_token_stride_bytes;
    for (int64_t head = 0; head < a.heads; ++head) {
      std::memcpy(row, key + head * a.key_head_stride_bytes, key_bytes);
      std::memcpy(row + key_bytes, value + head * a.value_head_stride_bytes, value_bytes);
      row += a.head_stride_bytes;
    }
  }
}

#if defined(__AVX512F__)
using CopyVec = __m512i;
static inline CopyVec copy_load(const char* in) { return _mm512_loadu_si512(in); }
static inline void copy_stream(char* out, CopyVec x) { _mm512_stream_si512(reinterpret_cast<CopyVec*>(out), x); }
#elif defined(__AVX2__)
using CopyVec = __m256i;
static inline CopyVec copy_load(const char* in) { return _mm256_loadu_si256(reinterpret_cast<const CopyVec*>(in)); }
static inline void copy_stream(char* out, CopyVec x) { _mm256_stream_si256(reinterpret_cast<CopyVec*>(out), x); }
#endif

#if defined(__AVX512F__) || defined(__AVX2__)
// Rows from this size on are written past the caches: what is copied is not read again soon, and a cached store would
// first read the target from memory.
constexpr size_t kStreamBytes = 4096;

static inline void copy_lines(char* out, const char* in, size_t count) {
  for (size_t i = 0; i < count; i += sizeof(CopyVec)) copy_stream(out + i, copy_load(in + i));
}

static void copy_row(char* out, const char* in, size_t count) {
  constexpr size_t kLine = 64, kPage = 4096, kPages = 4, kAhead = 256;
  if (count < kStreamBytes) {
    std::memcpy(out, in, count);
    return;
  }
  const size_t head = size_t(-reinterpret_cast<uintptr_t>(out)) % kLine;
  std::memcpy(out, in, head);
  size_t done = head;
  // Four pages side by side keep more of the memory's banks busy than one after the other.
  for (; done + kPages * kPage <= count; done += kPages * kPage) {
    for (size_t place = done; place < done + kPage; place += 2 * kLine) {
      for (size_t at = place; at < place + kPages * kPage; at += kPage) {
        _mm_prefetch(in + at + kAhead, _MM_HINT_T0);
        _mm_prefetch(in + at + kAhead + kLine, _MM_HINT_T0);
        copy_lines(out + at, in + at, 2 * kLine);
      }
    }
  }
  const size_t lines = (count - done) / kLine * kLine;
  copy_lines(out + done, in + done, lines);
  done += lines;
  std::memcpy(out + done, in + done, count - done);
}

// Streamed stores must be visible before the caller says that they are done.
static inline void copy_fence() { _mm_sfence(); }
#else
static void copy_row(char* out, const char* in, size_t count) { std::memcpy(out, in, count); }
static inline void copy_fence() {}
#endif

void copy_rows(const CopyRowsArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (a.target_rows[i] < 0) continue;
    const int64_t source = a.source_rows != nullptr ? a.source_rows[i] : i;
    copy_row(a.target + a.target_rows[i] * a.target_stride_bytes, a.source + source * a.source_stride_bytes,
             size_t(a.row_bytes));
  }
  copy_fence();
}

void to_float_array(DType dtype, const void* in, float* out, int64_t count) {
  with_type(dtype, [&](auto type) {
    const auto* x = static_cast<const decltype(type)*>(in);
    const int64_t whole = count - count % Vec::kLanes;
    for (int64_t i = 0; i < whole; i += Vec::kLanes) vec_store(out + i, vec_load(x + i));
    for (int64_t i = whole; i < count; ++i) out[i] = to_float(x[i]);
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
