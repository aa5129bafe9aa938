#include "io/buffer.h"

namespace halfbyte::io {

std::byte* Buffer::reserve(int64_t num_bytes) {
  num_bytes_ = num_bytes;
  if (num_bytes > host_.num_bytes()) {
    host_ = mirror_ = {};  // before the new ones: never both
    mirror_ = Memory(device_, num_bytes);
    host_ = device_.kind == DeviceKind::cpu ? mirror_ : Memory::host(device_, num_bytes);
  }
  return data();
}

void Buffer::upload(const Stream& stream) const {
  if (device_.kind != DeviceKind::cpu) copy(device_, mirror(), data(), num_bytes_, stream.handle());
}

void Buffer::download(const Stream& stream) const {
  if (device_.kind != DeviceKind::cpu) copy(device_, data(), mirror(), num_bytes_, stream.handle());
}

}  // namespace halfbyte::io
