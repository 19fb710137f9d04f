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
#elif defined(__SSE2__)
using CopyVec = __m128i;
static inline CopyVec copy_load(const char* in) { return _mm_loadu_si128(reinterpret_cast<const CopyVec*>(in)); }
static inline void copy_stream(char* out, CopyVec x) { _mm_stream_si128(reinterpret_cast<CopyVec*>(out), x); }
#endif

#if defined(__SSE2__)
constexpr size_t kLine = 64, kLines = 2 * kLine, kChunk = 4096;
// Chunks side by side keep more of the memory's banks busy than one after the other.
constexpr size_t kSide = 8;
// How far the reads go ahead.
constexpr size_t kAhead = 512;

// Past the caches: what is copied is not read again soon, and a cached store would first read the target from memory.
static inline void copy_lines(char* out, const char* in, size_t count) {
  for (size_t i = 0; i < count; i += sizeof(CopyVec)) copy_stream(out + i, copy_load(in + i));
}

struct Chunks {
  size_t count = 0;
  const char* in[kSide];
  char* out[kSide];
};

// The chunks of all rows as one sequence, so that the reads can go ahead over the end of a row.
class Rows {
 public:
  Rows(const CopyRowsArgs& a, int64_t begin, int64_t end) : a_(a), row_(begin), end_(end) {}

  // The next chunks; those that are missing at the end repeat the ones before.
  void next(Chunks* chunks) {
    for (chunks->count = 0; chunks->count < kSide; ++chunks->count, --whole_, in_ += kChunk, out_ += kChunk) {
      while (whole_ == 0) {
        if (row_ == end_) return;
        enter(row_++);
      }
      chunks->in[chunks->count] = in_;
      chunks->out[chunks->count] = out_;
    }
  }

 private:
  // Copies what lies before the first and behind the last chunk of a row: a target of streamed stores begins at a line.
  void enter(int64_t row) {
    if (a_.target_rows[row] < 0) return;
    in_ = a_.source + (a_.source_rows != nullptr ? a_.source_rows[row] : row) * a_.source_stride_bytes;
    out_ = a_.target + a_.target_rows[row] * a_.target_stride_bytes;
    size_t count = size_t(a_.row_bytes);
    if (count < kChunk) {
      std::memcpy(out_, in_, count);
      return;
    }
    const size_t head = size_t(-reinterpret_cast<uintptr_t>(out_)) % kLine;
    std::memcpy(out_, in_, head);
    in_ += head, out_ += head, count -= head;
    whole_ = count / kChunk;
    const size_t done = whole_ * kChunk, lines = (count - done) / kLine * kLine;
    copy_lines(out_ + done, in_ + done, lines);
    std::memcpy(out_ + done + lines, in_ + done + lines, count - done - lines);
  }

  const CopyRowsArgs& a_;
  int64_t row_, end_;
  size_t whole_ = 0;
  const char* in_ = nullptr;
  char* out_ = nullptr;
};

// Lines [begin, end) of every chunk; `ahead` is where the line that is read `kAhead` later lies.
template <typename Ahead>
static inline void copy_side_by_side(const Chunks& now, size_t begin, size_t end, Ahead ahead) {
  for (size_t place = begin; place < end; place += kLines) {
    for (size_t k = 0; k < now.count; ++k) {
      const char* later = ahead(k) + place;
      _mm_prefetch(later, _MM_HINT_T0);
      _mm_prefetch(later + kLine, _MM_HINT_T0);
      copy_lines(now.out[k] + place, now.in[k] + place, kLines);
    }
  }
}

void copy_rows(const CopyRowsArgs& a, int64_t begin, int64_t end) {
  Rows rows(a, begin, end);
  Chunks now, then;
  for (const char*& in : then.in) in = a.source;
  for (rows.next(&then); then.count > 0;) {
    now = then;
    rows.next(&then);
    copy_side_by_side(now, 0, kChunk - kAhead, [&](size_t k) { return now.in[k] + kAhead; });
    copy_side_by_side(now, kChunk - kAhead, kChunk, [&](size_t k) { return then.in[k] + kAhead - kChunk; });
  }
  // Streamed stores must be visible before the caller says that they are done.
  _mm_sfence();
}
#else
void copy_rows(const CopyRowsArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (a.target_rows[i] < 0) continue;
    const int64_t source = a.source_rows != nullptr ? a.source_rows[i] : i;
    std::memcpy(a.target + a.target_rows[i] * a.target_stride_bytes, a.source + source * a.source_stride_bytes,
                size_t(a.row_bytes));
  }
}
#endif

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
