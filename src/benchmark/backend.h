// What measuring takes of a device: time, bare reads, and the rates of what multiplies.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "benchmark/cublas.h"
#include "halfbyte/bench.hpp"
#include "halfbyte/device.hpp"

namespace halfbyte {

// Launches that are made and timed as one.
class Work {
 public:
  explicit Work(int num_launches) : num_launches_(num_launches) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;
  virtual void start() = 0;  // on a CUDA device: enqueues
  int num_launches() const { return num_launches_; }

 private:
  int num_launches_;
};

// What is read, and where is written.
struct Move {
  const void* from;
  void* to;
};

struct Timing {
  double us = 0;      // the median
  double spread = 0;  // the distance of the quartiles, of the median
};

// Multiply-adds in registers and nothing else.
struct MultiplyLoop {
  std::string name;
  double flops = 0;  // of a launch
  std::shared_ptr<Work> work;
};

class BenchBackend {
 public:
  virtual ~BenchBackend() = default;

  virtual const Stream& stream() const = 0;
  virtual PlanPreference preference() const { return {}; }
  virtual const char* reference_variant() const = 0;  // of qgemm: takes everything, with sums in f64
  virtual bool has_early_start() const { return false; }
  virtual const Cublas* cublas() const { return nullptr; }
  virtual std::vector<MultiplyLoop> multiply_loops(DType) const { return {}; }

  // Bytes that weights, and x, y and workspaces, rotate over.
  virtual int64_t weight_rotation_bytes() const = 0;
  virtual int64_t activation_rotation_bytes() const = 0;
  // How many launches to record of what takes so long and has so many buffers.
  virtual int launches_of(double us, int num_buffers) const = 0;
  // Rounds whose median is taken, and how often: the smallest is kept.
  virtual int rounds(bool quick) const = 0;
  virtual int passes(bool quick) const = 0;

  virtual void fill(void* memory, uint8_t byte, int64_t num_bytes) const = 0;

  // The last launch of the first start is launch(0). On a CUDA device launches are captured, and `launch` not
  // called again: it must enqueue on stream(). On the CPU they go on with 1, 2 ...
  virtual std::shared_ptr<Work> record(int num_launches, std::function<void(int)> launch) const = 0;
  // The same without a recording: what is launched by the host each time, as many callers do.
  virtual std::shared_ptr<Work> repeat(int num_launches, std::function<void(int)> launch) const = 0;
  // Different ways to read num_bytes (a multiple of 16) of each of `sets`, in turn. Chained: they start
  // early; none where has_early_start() is false.
  virtual std::vector<std::shared_ptr<Work>> readers(std::span<const void* const> sets, int64_t num_bytes,
                                                     int num_launches, bool chained) const = 0;

  // Different ways to read and to write so many bytes, which do nothing else; where these are equal also to
  // copy.
  virtual std::vector<std::shared_ptr<Work>> movers(std::span<const Move> sets, int64_t read_bytes,
                                                    int64_t write_bytes, int num_launches) const = 0;

  // A launch of each: in a round all are started in turn, so that they see the same clocks; the medians of
  // the rounds.
  virtual std::vector<Timing> medians(std::span<const std::shared_ptr<Work>> works, int rounds) const = 0;
};

inline std::vector<Timing> medians_of(std::vector<std::vector<double>>& times) {
  std::vector<Timing> medians;
  for (std::vector<double>& of_work : times) {
    std::ranges::sort(of_work);
    const size_t n = of_work.size();
    const double median = of_work[n / 2];
    medians.push_back({median, (of_work[n - 1 - n / 4] - of_work[n / 4]) / median});
  }
  return medians;
}

std::unique_ptr<BenchBackend> make_cpu_backend(int num_threads);
std::unique_ptr<BenchBackend> make_cuda_backend(Device device);

}  // namespace halfbyte
