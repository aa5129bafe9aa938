// Members of a group: what holds for all, and those of the CPU, which meet in memory.
#include "halfbyte/communicator.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "core/checks.h"
#include "core/tensor_check.h"
#include "core/words.h"
#include "formats/convert.h"
#include "ops/all_reduce/all_reduce.h"

namespace halfbyte {
namespace {

constexpr std::array<Word<Transport>, 3> kTransports{
    {{Transport::automatic, "auto"}, {Transport::peer, "peer"}, {Transport::nccl, "nccl"}}};

// ---- Threads

// Where threads wait for each other, and what they bring.
class Meeting {
 public:
  explicit Meeting(size_t size) : tensors(size) {}

  // Waits until all have come, or throws after abort(): then nobody goes on.
  void begin() {
    std::unique_lock lock(mutex_);
    HALFBYTE_CHECK(!aborted_, cancelled, "{}", kGroupAborted);
    HALFBYTE_CHECK(come(lock, true), cancelled, "{}", kGroupAborted);
  }
  // The same of who has begun together, whatever happens: they work in each other's memory.
  void end() {
    std::unique_lock lock(mutex_);
    come(lock, false);
  }
  void abort() {
    const std::scoped_lock lock(mutex_);
    aborted_ = true;
    wake();
  }

  std::vector<TensorView> tensors;  // of each rank

 private:
  bool come(std::unique_lock<std::mutex>& lock, bool may_end) {
    const uint64_t round = num_rounds_;
    if (++num_here_ < tensors.size()) {
      while (num_rounds_ == round && !(may_end && aborted_)) {
        const int seen = num_wakes_;
        lock.unlock();
        num_wakes_.wait(seen);
        lock.lock();
      }
      return num_rounds_ != round;
    }
    num_here_ = 0;
    ++num_rounds_;
    wake();
    return true;
  }
  void wake() {
    ++num_wakes_;
    num_wakes_.notify_all();
  }

  // The number of wakes is what threads wait for: std::condition_variable::wait needs a libstdc++ that
  // manylinux_2_34 does not have.
  std::atomic<int> num_wakes_ = 0;
  std::mutex mutex_;
  size_t num_here_ = 0;
  uint64_t num_rounds_ = 0;
  bool aborted_ = false;
};

template <class T, class Load, class Store>
void sum_elements(std::span<const TensorView> tensors, int64_t begin, int64_t end, Load load, Store store) {
  constexpr int64_t kBlock = 512;
  float sums[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    for (size_t rank = 0; rank < tensors.size(); ++rank) {
      const T* const from = static_cast<const T*>(tensors[rank].data) + at;
      for (int64_t i = 0; i < count; ++i) sums[i] = rank == 0 ? load(from[i]) : sums[i] + load(from[i]);
    }
    for (const TensorView& tensor : tensors) {
      T* const to = static_cast<T*>(tensor.data) + at;
      for (int64_t i = 0; i < count; ++i) to[i] = store(sums[i]);
    }
  }
}

struct ThreadMember : Communicator::Impl {
  explicit ThreadMember(std::shared_ptr<Meeting> at) : meeting(std::move(at)) { transport = "threads"; }

  void all_reduce(const TensorView& x, void*) override {
    std::vector<TensorView>& tensors = meeting->tensors;
    tensors[static_cast<size_t>(rank)] = x;
    meeting->begin();
    const TensorView& first = tensors.front();
    const int64_t count = num_elements(first);
    const TensorView* other = nullptr;
    for (const TensorView& tensor : tensors)
      if (tensor.dtype != first.dtype || num_elements(tensor) != count) other = &tensor;
    if (other == nullptr) sum(count);
    const std::string difference =
        other == nullptr ? ""
                         : fmt::format("{} elements of {} and {} of {}", count, to_string(first.dtype),
                                       num_elements(*other), to_string(other->dtype));
    meeting->end();
    HALFBYTE_CHECK(difference.empty(), usage, "all_reduce: x must be alike for all members, got {}",
                   difference);
  }
  void abort() override { meeting->abort(); }

  // Of this member's part, for all.
  void sum(int64_t count) const {
    const std::span<const TensorView> tensors = meeting->tensors;
    const int64_t begin = count / size * rank + std::min<int64_t>(count % size, rank),
                  end = begin + count / size + (rank < count % size ? 1 : 0);
    const auto same = [](float value) { return value; };
    switch (tensors.front().dtype) {
      case DType::bf16:
        return sum_elements<uint16_t>(tensors, begin, end, formats::bf16_to_f32, formats::f32_to_bf16);
      case DType::f16:
        return sum_elements<uint16_t>(tensors, begin, end, formats::f16_to_f32, formats::f32_to_f16);
      default:
        return sum_elements<float>(tensors, begin, end, same, same);
    }
  }

  std::shared_ptr<Meeting> meeting;
};

}  // namespace

// ---- All

const char* to_string(Transport transport) { return word_of(kTransports, transport); }
Transport parse_transport(std::string_view word) { return value_of(kTransports, word, "transport"); }

std::vector<Communicator> Communicator::of_devices(std::span<const Device> devices, Transport transport) {
  HALFBYTE_CHECK(!devices.empty(), usage, "communicator: devices must not be empty");
  const DeviceKind kind = devices.front().kind;
  for (const Device& device : devices)
    HALFBYTE_CHECK(device.kind == kind, usage, "communicator: devices must be of one kind, got {}",
                   halfbyte::to_string(devices));
  std::vector<std::shared_ptr<Impl>> impls;
  if (kind == DeviceKind::cuda) {
    impls = communicators_of_cuda(devices, transport);
  } else {
    HALFBYTE_CHECK(transport == Transport::automatic, usage,
                   "communicator: transport must be auto on the CPU, got {}", halfbyte::to_string(transport));
    const auto meeting = std::make_shared<Meeting>(devices.size());
    for (size_t i = 0; i < devices.size(); ++i) impls.push_back(std::make_shared<ThreadMember>(meeting));
  }
  std::vector<Communicator> members;
  for (std::shared_ptr<Impl>& impl : impls) {
    impl->rank = static_cast<int>(members.size());
    impl->size = static_cast<int>(devices.size());
    impl->device = devices[members.size()];
    members.push_back(Communicator(std::move(impl)));
  }
  return members;
}

std::string Communicator::create_id() { return create_nccl_id(); }

Communicator Communicator::connect(Device device, const std::string& id, int rank, int size) {
  HALFBYTE_CHECK(device.kind == DeviceKind::cuda, usage,
                 "communicator: processes are connected by NCCL, which has no {}",
                 halfbyte::to_string(device));
  HALFBYTE_CHECK(id.size() == kIdBytes, usage, "communicator: id must be of {} bytes, got {}", kIdBytes,
                 id.size());
  HALFBYTE_CHECK(0 <= rank && rank < size, usage,
                 "communicator: rank must be from 0 to size - 1, got {} of {}", rank, size);
  std::shared_ptr<Impl> impl = connect_cuda(device, id, rank, size);
  impl->rank = rank;
  impl->size = size;
  impl->device = device;
  return Communicator(std::move(impl));
}

int Communicator::rank() const { return impl_->rank; }
int Communicator::size() const { return impl_->size; }
Device Communicator::device() const { return impl_->device; }
const std::string& Communicator::transport() const { return impl_->transport; }

void Communicator::all_reduce(const TensorView& x, void* stream) const {
  HALFBYTE_CHECK(x.dtype == DType::f32 || x.dtype == DType::bf16 || x.dtype == DType::f16, usage,
                 "all_reduce: x must be f32, bf16 or f16, got {}", halfbyte::to_string(x.dtype));
  HALFBYTE_CHECK(x.device == device(), usage, "all_reduce: x must be on {}, is on {}",
                 halfbyte::to_string(device()), halfbyte::to_string(x.device));
  HALFBYTE_CHECK(is_contiguous(x), usage, "all_reduce: x must be contiguous, got strides {}",
                 text_of(x.strides));
  const int64_t num_bytes = contiguous_bytes(x.dtype, x.shape);
  HALFBYTE_CHECK(x.num_bytes < 0 || x.num_bytes >= num_bytes, usage,
                 "all_reduce: x must have {} bytes, its memory has {}", num_bytes, x.num_bytes);
  const int64_t alignment = size_of(x.dtype);
  HALFBYTE_CHECK(reinterpret_cast<uintptr_t>(x.data) % static_cast<uintptr_t>(alignment) == 0, usage,
                 "all_reduce: x must be aligned to {} bytes, is at {}", alignment, fmt::ptr(x.data));
  if (num_bytes > 0) check_memory("all_reduce: x", x.data, num_bytes, x.device);
  impl_->all_reduce(x, stream);
}

void Communicator::abort() const { impl_->abort(); }

}  // namespace halfbyte
