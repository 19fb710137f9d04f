// Attention of one new token per request over its pages, grouped heads.
//
// An item is (row, KV head, part): a part is a stretch of at most `split` positions, so that one long request can
// keep several threads busy. Each part leaves its maximum score, its sum of exponentials and its weighted sum of values;
// `merge_decode_parts` joins them. The result does not depend on the number of threads.
#include "simd.h"

namespace vllm_native {
namespace VLLM_ISA {

// Query heads that share one pass over the keys.
constexpr int64_t kGroup = 8;
// Positions whose scores are held at a time.
constexpr int64_t kTile = 64;

template <typename T>
struct Part {
  const DecodeAttentionArgs& a;
  const T* pages;
  const int32_t* table;
  int64_t head;

  // Addresses of the rows of positions [first, first + count).
  void rows(int64_t first, int64_t count, const T** out) const {
    int64_t block = first / a.block_size;
    int64_t offset = first - block * a.block_size;
    for (int64_t t = 0; t < count; ++block, offset = 0) {
      const T* row = pages + int64_t(table[block]) * a.block_stride + head * a.head_stride + offset * a.token_stride;
      const int64_t stop = min64(count, t + a.block_size - offset);
      for (; t < stop; ++t, row += a.token_stride) out[t] = row;
    }
  }
};

// Sums of G queries times TOKENS keys.
template <int G, int TOKENS, typename T>
static inline void dot_keys(const float* q, const T* const* keys, int64_t dim, Vec (*sums)[TOKENS]) {
  for (int g = 0; g < G; ++g) {
    for (int t = 0; t < TOKENS; ++t) sums[g][t] = vec_set(0);
  }
  const int64_t whole = dim - dim % Vec::kLanes;
  for (int64_t c = 0; c < whole; c += Vec::kLanes) {
    Vec k[TOKENS];
    for (int t = 0; t < TOKENS; ++t) k[t] = vec_load(keys[t] + c);
    for (int g = 0; g < G; ++g) {
      const Vec query = vec_load(q + g * dim + c);
      for (int t = 0; t < TOKENS; ++t) sums[g][t] = vec_fma(k[t], query, sums[g][t]);
    }
  }
  const int64_t rest = dim - whole;
  if (rest) {
    for (int g = 0; g < G; ++g) {
      const Vec query = vec_load_part(q + g * dim + whole, rest);
      for (int t = 0; t < TOKENS; ++t) sums[g][t] = vec_fma(vec_load_part(keys[t] + whole, rest), query, sums[g][t]);
    }
  }
}

// Query heads up to which four keys at a time fit the vector registers.
#if defined(__AVX512F__)
constexpr int kFourKeysGroup = 5;
#else
constexpr int kFourKeysGroup = 2;
#endif

// Scores of `count` keys for G queries: scores[g][t] = q[g] . key[t].
template <int G, typename T>
static void score_tile(const float* q, const T* const* rows, int64_t count, int64_t dim, float (*scores)[kTile]) {
  int64_t t = 0;
  if constexpr (G <= kFourKeysGroup) {
    for (; t + 4 <= count; t += 4) {
      Vec sums[G][4];
      dot_keys<G, 4>(q, rows + t, dim, sums);
      for (int g = 0; g < G; ++g) vec_sum4(sums[g][0], sums[g][1], sums[g][2], sums[g][3], scores[g] + t);
    }
  }
  for (; t < count; ++t) {
    Vec sums[G][1];
    dot_keys<G, 1>(q, rows + t, dim, sums);
    for (int g = 0; g < G; ++g) scores[g][t] = vec_sum(sums[g][0]);
  }
}

// acc[g] += sum over t of weights[g][t] * value[t].
template <int G, typename T>
static void add_values(float (*weights)[kTile], const T* const* rows, int64_t count, int64_t dim, float* acc) {
  int64_t c = 0;
  for (; c + Vec::kLanes <= dim; c += Vec::kLanes) {
    Vec sums[G];
    for (int g = 0; g < G; ++g) sums[g] = vec_load(acc + g * dim + c);
    for (int64_t t = 0; t < count; ++t) {
      const Vec v = vec_load(rows[t] + c);
      for (int g = 0; g < G; ++g) sums[g] = vec_fma(vec_set(weights[g][t]), v, sums[g]);
    }
    for (int g = 0; g < G; ++g) vec_store(acc + g * dim + c, sums[g]);
  }
  for (; c < dim; ++c) {
    for (int64_t t = 0; t < count; ++t) {
      const float v = to_float(rows[t][c]);
      for (int g = 0; g < G; ++g) acc[g * dim + c] += weights[g][t] * v;
    }
  }
}

// Turns the scores of a tile into weights relative to the new maximum; returns the factor for what came before.
static inline float soften(float* scores, int64_t count, float scale, float* maximum, float* total) {
  float top = *maximum;
  for (int64_t t = 0; t < count; ++t) {
    scores[t] *= scale;
    if (scores[t] > top) top = scores[t];
  }
  for (int64_t t = count; t < kTile; ++t) scores[t] = top;  // padding of the last vector, not summed below
  const Vec shift = vec_set(top);
  for (int64_t t = 0; t < count; t += Vec::kLanes) vec_store(scores + t, vec_exp(vec_load(scores + t) - shift));
  float sum = 0;
  for (int64_t t = 0; t < count; ++t) sum += scores[t];
  const float factor = *maximum == -INFINITY ? 0.0f : exp_one(*maximum - top);
  *total = *total * factor + sum;
  *maximum = top;
  return factor;
}

template <int G, typename T>
static void attend_part(const Part<T>& part, const float* q, int64_t first, int64_t end, float* out) {
  const DecodeAttentionArgs& a = part.a;
  float scores[G][kTile];
  const T* rows[kTile];
  // Layout of a partial result: maximum, total, then the vector.
  const int64_t stride = a.parts_max * (a.value_dim + 2);
  float acc[G * 1024];
  float maximum[G], total[G];
  for (int g = 0; g < G; ++g) {
    maximum[g] = -INFINITY;
    total[g] = 0;
  }
  std::memset(acc, 0, sizeof(float) * size_t(G * a.value_dim));
  for (int64_t start = first; start < end; start += kTile) {
    const int64_t count = min64(kTile, end - start);
    part.rows(start, count, rows);
    score_tile<G>(q, rows, count, a.key_dim, scores);
    for (int g = 0; g < G; ++g) {
      const float factor = soften(scores[g], count, a.scale, &maximum[g], &total[g]);
      if (factor != 1.0f) {
        for (int64_t c = 0; c < a.value_dim; ++c) acc[g * a.value_dim + c] *= factor;
      }
    }
    for (int64_t t = 0; t < count; ++t) rows[t] += a.key_dim;
    add_values<G>(scores, rows, count, a.value_dim, acc);
  }
  for (int g = 0; g < G; ++g) {
    out[g * stride] = maximum[g];
    out[g * stride + 1] = total[g];
    std::memcpy(out + g * stride + 2, acc + g * a.value_dim, sizeof(float) * size_t(a.value_dim));
  }
}

template <typename T>
static void attend_item(const DecodeAttentionArgs& a, int64_t item) {
  const int64_t index = item % a.parts_max;
  const int64_t head = item / a.parts_max % a.kv_heads;
  const int64_t row = item / (a.parts_max * a.kv_heads);
  const int64_t first = a.lows[row] + index * a.split;
  const int64_t end = min64(first + a.split, a.lengths[row]);
  if (first >= end) return;
  const Part<T> part{a, static_cast<const T*>(a.pages), a.table + row * a.table_stride, head};
  const int64_t group = a.q_heads / a.kv_heads;
  float q[kGroup * 1024];
  int64_t count = 0;
  for (int64_t g = 0; g < group; g += count) {
    // Five to seven heads go as four and the rest: fewer variants to compile, and the keys are still near.
    count = group - g >= kGroup ? kGroup : min64(4, group - g);
    const int64_t q_head = head * group + g;
    for (int64_t i = 0; i < count; ++i) {
      const T* source = static_cast<const T*>(a.q) + row * a.q_row_stride + (q_head + i) * a.q_head_stride;
      for (int64_t c = 0; c < a.key_dim; ++c) q[i * a.key_dim + c] = to_float(source[c]);
    }
    float* out = a.partial + ((row * a.q_heads + q_head) * a.parts_max + index) * (a.value_dim + 2);
    switch (count) {
      case 1: attend_part<1>(part, q, first, end, out); break;
      case 2: attend_part<2>(part, q, first, end, out); break;
      case 3: attend_part<3>(part, q, first, end, out); break;
      case 4: attend_part<4>(part, q, first, end, out); break;
      default: attend_part<8>(part, q, first, end, out); break;
    }
  }
}

void decode_attention(const DecodeAttentionArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    for (int64_t item = begin; item < end; ++item) attend_item<decltype(type)>(a, item);
  });
}

template <typename T>
static void merge_item(const DecodeAttentionArgs& a, int64_t item) {
  const int64_t row = item / a.q_heads;
  const int64_t length = max64(0, a.lengths[row] - a.lows[row]);
  const int64_t parts = (length + a.split - 1) / a.split;
  const int64_t stride = a.value_dim + 2;
  float* part = a.partial + item * a.parts_max * stride;
  T* out = static_cast<T*>(a.out) + item * a.value_dim;
  float maximum = -INFINITY;
  for (int64_t i = 0; i < parts; ++i) {
    if (part[i * stride] > maximum) maximum = part[i * stride];
  }
  float total = 0;
  for (int64_t i = 0; i < parts; ++i) {
    float* p = part + i * stride;
    p[0] = exp_one(p[0] - maximum);  // the maximum has served; now the part's factor
    total += p[0] * p[1];
  }
  const float inverse = parts ? 1.0f / total : 0.0f;
  for (int64_t c = 0; c < a.value_dim; ++c) {
    float sum = 0;
    for (int64_t i = 0; i < parts; ++i) sum += part[i * stride + 2 + c] * part[i * stride];
    from_float(sum * inverse, out + c);
  }
}

void merge_decode_parts(const DecodeAttentionArgs& a, int64_t begin, int64_t end) {
  with_type(a.dtype, [&](auto type) {
    for (int64_t item = begin; item < end; ++item) merge_item<decltype(type)>(a, item);
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
