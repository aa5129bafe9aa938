#include "host_math.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

// The function is compiled for each of these, and the best is chosen when the program starts.
#if defined(__x86_64__)
#define LLAMA_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LLAMA_MULTIVERSION
#endif

namespace llama {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kElementwiseGrain = 1 << 14;  // elements that are worth a thread
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

// Rows of x at a time: their sums stay in registers.
template <int kRows>
[[gnu::always_inline]] inline void rows_times_panel(const float* x, int64_t k, const float* panel,
                                                    float* sums) {
  Lanes total[kRows] = {};
  for (int64_t i = 0; i < k; ++i) {
    Lanes w;
    std::memcpy(&w, panel + i * kLanes, sizeof w);
    for (int r = 0; r < kRows; ++r) total[r] += x[r * k + i] * w;
  }
  std::memcpy(sums, total, sizeof total);
}

// y[:, 0 ... width) of rows of y that are n apart.
LLAMA_MULTIVERSION void times_panel(const float* x, int64_t m, int64_t k, const float* panel,
                                    const float* bias, float* y, int64_t n, int64_t width) {
  constexpr int kRows = 8;
  float sums[kRows * kLanes];
  for (int64_t row = 0, rows = 0; row < m; row += rows) {
    rows = m - row < kRows ? 1 : kRows;
    if (rows == kRows)
      rows_times_panel<kRows>(x + row * k, k, panel, sums);
    else
      rows_times_panel<1>(x + row * k, k, panel, sums);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < width; ++c)
        y[(row + r) * n + c] = sums[r * kLanes + c] + (bias != nullptr ? bias[c] : 0);
  }
}

// One query of one head over `length` positions.
LLAMA_MULTIVERSION void attend(const float* __restrict q, const float* __restrict keys,
                               const float* __restrict values, int64_t head_dim, int64_t capacity,
                               int64_t length, float* __restrict scores, float* __restrict y) {
  const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
  std::fill(scores, scores + length, 0.0f);
  for (int64_t d = 0; d < head_dim; ++d)
    for (int64_t j = 0; j < length; ++j) scores[j] += q[d] * keys[d * capacity + j];
  const float largest = *std::max_element(scores, scores + length);
  float sum = 0;
  for (int64_t j = 0; j < length; ++j) sum += scores[j] = std::exp((scores[j] - largest) * scale);
  std::fill(y, y + head_dim, 0.0f);
  for (int64_t j = 0; j < length; ++j)
    for (int64_t d = 0; d < head_dim; ++d) y[d] += scores[j] * values[j * head_dim + d];
  for (int64_t d = 0; d < head_dim; ++d) y[d] /= sum;
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, int num_threads,
                  const std::function<void(int64_t, int64_t)>& task) {
  // Several ranges a thread: they take unequal time.
  const int64_t step = std::max(std::max<int64_t>(grain, 1), count / (8 * num_threads));
  std::atomic<int64_t> next = 0;
  const auto work = [&] {
    for (int64_t begin = 0; (begin = next.fetch_add(step)) < count;)
      task(begin, std::min(begin + step, count));
  };
  std::vector<std::jthread> helpers;
  for (int64_t i = 1; i < num_threads && i * step < count; ++i) helpers.emplace_back(work);
  work();
}

uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

DenseMatrix::DenseMatrix(const float* weight, int64_t n, int64_t k)
    : n_(n), k_(k), panels_(static_cast<size_t>((n + kLanes - 1) / kLanes * k * kLanes)) {
  for (int64_t row = 0; row < n; ++row)
    for (int64_t i = 0; i < k; ++i)
      panels_[static_cast<size_t>((row / kLanes * k + i) * kLanes + row % kLanes)] = weight[row * k + i];
}

void DenseMatrix::multiply(const float* x, int64_t m, const float* bias, float* y, int num_threads) const {
  const int64_t panel_grain = (1 << 20) / (m * k_ * kLanes) + 1;  // a million products are worth a thread
  parallel_for((n_ + kLanes - 1) / kLanes, panel_grain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t column = panel * kLanes;
      times_panel(x, m, k_, panels_.data() + column * k_, bias != nullptr ? bias + column : nullptr,
                  y + column, n_, std::min(kLanes, n_ - column));
    }
  });
}

void rms_norm(const float* x, int64_t m, int64_t n, const float* weight, float eps, float* y,
              int num_threads) {
  parallel_for(m, kElementwiseGrain / n, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double squares = 0;
      for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[row * n + i]) * x[row * n + i];
      const float factor = 1 / std::sqrt(static_cast<float>(squares / static_cast<double>(n)) + eps);
      for (int64_t i = 0; i < n; ++i) y[row * n + i] = x[row * n + i] * factor * weight[i];
    }
  });
}

void silu_multiply(float* gate, const float* up, int64_t count, int num_threads) {
  parallel_for(count, kElementwiseGrain, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  });
}

Routing route(const float* logits, int64_t m, int64_t num_experts, int64_t per_token, bool normalized) {
  Routing routing{per_token, {}, {}};
  std::vector<int32_t> order(static_cast<size_t>(num_experts));
  for (const float* row = logits; row < logits + m * num_experts; row += num_experts) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + per_token, order.end(),
                      [row](int32_t a, int32_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
    // What the weights are divided by: the sum over the experts that are used, or over all.
    float sum = 0;
    for (int64_t j = 0; j < (normalized ? per_token : num_experts); ++j)
      sum += std::exp(row[order[static_cast<size_t>(j)]] - row[order[0]]);
    for (int64_t j = 0; j < per_token; ++j) {
      const int32_t expert = order[static_cast<size_t>(j)];
      routing.experts.push_back(expert);
      routing.weights.push_back(std::exp(row[expert] - row[order[0]]) / sum);
    }
  }
  return routing;
}

void rope(float* x, int64_t m, int64_t num_heads, const std::vector<float>& frequencies, int64_t first,
          int num_threads) {
  const auto half = static_cast<int64_t>(frequencies.size());
  parallel_for(m, kElementwiseGrain / (num_heads * half), num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(first + row) * frequencies[static_cast<size_t>(i)];
        const float c = std::cos(angle), s = std::sin(angle);
        for (int64_t head = 0; head < num_heads; ++head) {
          float* pair = x + (row * num_heads + head) * 2 * half + i;
          const float a = pair[0], b = pair[half];
          pair[0] = a * c - b * s;
          pair[half] = b * c + a * s;
        }
      }
  });
}

KeyValueCache::KeyValueCache(int64_t heads, int64_t dim, int64_t positions)
    : num_heads(heads),
      head_dim(dim),
      capacity(positions),
      keys(static_cast<size_t>(heads * dim * positions)),
      values(keys.size()) {}

void KeyValueCache::store(const float* k, const float* v, int64_t m, int64_t first) {
  for (int64_t row = 0; row < m; ++row)
    for (int64_t head = 0; head < num_heads; ++head)
      for (int64_t d = 0; d < head_dim; ++d) {
        const int64_t from = (row * num_heads + head) * head_dim + d;
        keys[static_cast<size_t>((head * head_dim + d) * capacity + first + row)] = k[from];
        values[static_cast<size_t>((head * capacity + first + row) * head_dim + d)] = v[from];
      }
}

void attention(const float* q, int64_t m, int64_t num_heads, const KeyValueCache& cache, int64_t first,
               float* y, int num_threads) {
  const int64_t head_dim = cache.head_dim, shared = num_heads / cache.num_heads;
  const int64_t grain = kElementwiseGrain / (head_dim * (first + m)) + 1;
  parallel_for(num_heads * m, grain, num_threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(static_cast<size_t>(first + m));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / m, row = item % m, offset = head / shared * head_dim * cache.capacity;
      attend(q + (row * num_heads + head) * head_dim, cache.keys.data() + offset,
             cache.values.data() + offset, head_dim, cache.capacity, first + row + 1, scores.data(),
             y + (row * num_heads + head) * head_dim);
    }
  });
}

}  // namespace llama
