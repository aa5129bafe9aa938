#include "io/whole_tensors.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "io/file.h"

namespace halfbyte::io {
namespace {

constexpr uint64_t kPartBytes = 1 << 20;

}  // namespace

const std::byte* WholeTensor::get(const ReadBytes& read) {
  if (is_complete_) return bytes_.get();
  std::unique_lock lock(mutex_);
  if (!bytes_) {
    parts_.assign(static_cast<size_t>(ceil_div(num_bytes_, kPartBytes)), Part::missing);
    bytes_ = std::make_unique_for_overwrite<std::byte[]>(num_bytes_);
  }
  const auto is_there = [](Part part) { return part == Part::there; };
  const auto change = [this](Part& part, Part to) {
    part = to;
    ++num_changes_;
    num_changes_.notify_all();
  };
  while (!std::ranges::all_of(parts_, is_there)) {
    const auto part = std::ranges::find(parts_, Part::missing);
    if (part == parts_.end()) {
      const int seen = num_changes_;
      lock.unlock();
      num_changes_.wait(seen);
      lock.lock();
      continue;
    }
    const auto begin = static_cast<uint64_t>(part - parts_.begin()) * kPartBytes;
    *part = Part::being_read;
    lock.unlock();
    try {
      read(begin, {bytes_.get() + begin, std::min(kPartBytes, num_bytes_ - begin)});
    } catch (...) {
      lock.lock();
      change(*part, Part::missing);
      throw;
    }
    lock.lock();
    change(*part, Part::there);
  }
  is_complete_ = true;
  return bytes_.get();
}

void WholeTensors::read(const StoredTensor& tensor, const StoredRange& range, const ReadBytes& read,
                        std::span<std::byte> bytes) {
  std::shared_ptr<WholeTensor> whole;
  {
    const std::lock_guard lock(mutex_);
    auto found = std::ranges::find(entries_, &tensor, &Entry::tensor);
    if (found == entries_.end()) {
      entries_.push_back({&tensor, std::make_shared<WholeTensor>(tensor.num_bytes), tensor.num_bytes});
    } else {
      std::rotate(found, found + 1, entries_.end());
    }
    Entry& entry = entries_.back();
    whole = entry.whole;
    entry.missing -= std::min(entry.missing, range.num_bytes());
    if (entry.missing == 0) entries_.pop_back();
    uint64_t kept = 0;  // behind, in this order
    for (const Entry& each : entries_) kept += each.tensor->num_bytes;
    auto first = entries_.begin();
    for (; kept > kMostBytes && first + 1 < entries_.end(); ++first) kept -= first->tensor->num_bytes;
    entries_.erase(entries_.begin(), first);
  }
  const std::byte* const all = whole->get(read);
  for_each_run(range, [&](uint64_t offset, uint64_t begin, uint64_t size) {
    HALFBYTE_CHECK(offset <= tensor.num_bytes && size <= tensor.num_bytes - offset, usage,
                   "read: bytes [{}, {} + {}) are not within tensor \"{}\" of {} bytes", offset, offset, size,
                   printable(tensor.name), tensor.num_bytes);
    std::memcpy(bytes.data() + begin, all + offset, size);
  });
}

}  // namespace halfbyte::io
