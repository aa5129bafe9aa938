// Compares the decoded weights of two checkpoints.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/checks.h"
#include "cpu/parallel.h"
#include "io/verify.h"

namespace halfbyte {
namespace io {
namespace {

// Fixed: sums are added block by block, the same for every number of threads.
constexpr int64_t kCompareElements = kBlockElements;

struct Pair {
  const Weight *a, *b;
  size_t row;
};

struct Task {
  size_t pair;
  int64_t begin, count;  // elements, or bytes of tensors that are not floating
};

struct Difference {
  ErrorSums sums;
  bool bytes_differ = false;
};

bool decodes(const Weight& weight) { return weight.dtype && is_floating(*weight.dtype); }

int64_t elements_at_once(const Checkpoint::Impl& checkpoint, const Weight& weight) {
  const StoredWeight* quantized = checkpoint.quantized_weight(weight);
  if (!quantized) return kCompareElements;
  return preferred_elements(quantized->weight,
                            quantized->transposed ? kTransposedElements : kCompareElements);
}

// Why two weights of one name cannot be compared; empty if they can.
std::string mismatch(const Checkpoint::Impl& checkpoint_a, const Weight& a,
                     const Checkpoint::Impl& checkpoint_b, const Weight& b) {
  if (a.shape != b.shape)
    return fmt::format("shape [{}] against [{}]", fmt::join(a.shape, ", "), fmt::join(b.shape, ", "));
  if (decodes(a) && decodes(b)) return "";
  const std::string& dtype_a = checkpoint_a.tensors[static_cast<size_t>(a.parts.front())].dtype;
  const std::string& dtype_b = checkpoint_b.tensors[static_cast<size_t>(b.parts.front())].dtype;
  return dtype_a == dtype_b ? "" : fmt::format("dtype {} against {}", dtype_a, dtype_b);
}

class Comparer {
 public:
  Comparer(const Checkpoint::Impl& a, const Checkpoint::Impl& b) : a_(a), b_(b), decode_a_(a), decode_b_(b) {}

  Difference compare(const Pair& pair, const Task& task) {
    Difference difference;
    if (decodes(*pair.a)) {
      std::byte* x = x_.reserve(task.count * 4);
      std::byte* y = y_.reserve(task.count * 4);
      decode_a_.decode(*pair.a, task.begin, task.count, DType::f32, x);
      decode_b_.decode(*pair.b, task.begin, task.count, DType::f32, y);
      difference.sums.add(reinterpret_cast<const float*>(x), reinterpret_cast<const float*>(y), task.count,
                          task.begin);
    } else {
      const auto size = static_cast<size_t>(task.count);
      const std::span<std::byte> x(x_.reserve(task.count), size), y(y_.reserve(task.count), size);
      a_.read(a_.tensors[static_cast<size_t>(pair.a->parts.front())], static_cast<uint64_t>(task.begin), x);
      b_.read(b_.tensors[static_cast<size_t>(pair.b->parts.front())], static_cast<uint64_t>(task.begin), y);
      difference.bytes_differ = std::memcmp(x.data(), y.data(), size) != 0;
    }
    return difference;
  }

 private:
  const Checkpoint::Impl &a_, &b_;
  Decoder decode_a_, decode_b_;
  Buffer x_, y_;
};

void fill_row(CompareRow& row, const Difference& difference) {
  if (difference.bytes_differ) row.problem = "bytes differ";
  if (!std::isfinite(difference.sums.squared_error) || !std::isfinite(difference.sums.squared_source))
    row.problem = "not finite";
  if (!row.problem.empty()) return;
  row.max_error = difference.sums.max_error;
  row.max_error_index = difference.sums.max_error_index;
  row.relative_rmse = difference.sums.relative_rmse();
  row.snr_db = difference.sums.snr_db();
}

std::vector<CompareRow> compare(const Checkpoint::Impl& a, const Checkpoint::Impl& b, int num_threads,
                                ProgressFunction progress) {
  std::vector<CompareRow> rows;
  std::vector<Pair> pairs;
  std::vector<Task> tasks;
  uint64_t total_bytes = 0;
  // Both are sorted by name: a merge.
  auto x = a.weights.begin();
  auto y = b.weights.begin();
  while (x != a.weights.end() || y != b.weights.end()) {
    CompareRow& row = rows.emplace_back();
    if (y == b.weights.end() || (x != a.weights.end() && x->name < y->name)) {
      row.name = (x++)->name;
      row.problem = "missing in B";
    } else if (x == a.weights.end() || y->name < x->name) {
      row.name = (y++)->name;
      row.problem = "missing in A";
    } else {
      row.name = x->name;
      row.problem = mismatch(a, *x, b, *y);
      if (row.problem.empty()) {
        const int64_t n = decodes(*x) ? num_elements(*x) : static_cast<int64_t>(x->num_bytes);
        const int64_t most = std::max(elements_at_once(a, *x), elements_at_once(b, *y));
        for (int64_t begin = 0; begin < n; begin += most)
          tasks.push_back({pairs.size(), begin, std::min(most, n - begin)});
        pairs.push_back({&*x, &*y, rows.size() - 1});
        total_bytes += static_cast<uint64_t>(n);
      }
      ++x, ++y;
    }
  }
  ProgressReporter reporter(std::move(progress));
  ProgressPhase phase(reporter, "compare", total_bytes);
  std::vector<Difference> differences(tasks.size());
  std::vector<Comparer> comparers;
  for (int i = 0; i < effective_threads(num_threads); ++i) comparers.emplace_back(a, b);
  parallel_for(
      static_cast<int64_t>(tasks.size()), 1, num_threads, [&](int64_t begin, int64_t end, int worker) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
          differences[i] = comparers[static_cast<size_t>(worker)].compare(pairs[tasks[i].pair], tasks[i]);
          phase.add(static_cast<uint64_t>(tasks[i].count));
        }
      });
  a.check_unchanged();
  b.check_unchanged();
  std::vector<Difference> totals(pairs.size());
  for (size_t i = 0; i < tasks.size(); ++i) {
    totals[tasks[i].pair].sums.merge(differences[i].sums);
    totals[tasks[i].pair].bytes_differ |= differences[i].bytes_differ;
  }
  for (size_t i = 0; i < pairs.size(); ++i) fill_row(rows[pairs[i].row], totals[i]);
  std::ranges::stable_sort(rows, [](const CompareRow& p, const CompareRow& q) {
    if (p.problem.empty() != q.problem.empty()) return !p.problem.empty();
    return p.problem.empty() && p.snr_db < q.snr_db;
  });
  return rows;
}

}  // namespace
}  // namespace io

std::vector<CompareRow> compare_checkpoints(const std::string& a, const std::string& b, int num_threads,
                                            ProgressFunction progress) {
  HALFBYTE_CHECK(num_threads >= 0, usage, "num_threads must not be negative, got {}", num_threads);
  const Checkpoint checkpoint_a = Checkpoint::open(a, progress);
  const Checkpoint checkpoint_b = Checkpoint::open(b, progress);
  return io::compare(checkpoint_a.impl(), checkpoint_b.impl(), num_threads, std::move(progress));
}

}  // namespace halfbyte
