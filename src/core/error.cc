#include "halfbyte/error.hpp"

namespace halfbyte {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::ok:
      return "OK";
    case ErrorCode::bug:
      return "BUG";
    case ErrorCode::usage:
      return "USAGE";
    case ErrorCode::bad_input:
      return "BAD_INPUT";
    case ErrorCode::verify:
      return "VERIFY";
    case ErrorCode::device:
      return "DEVICE";
    case ErrorCode::io:
      return "IO";
    case ErrorCode::no_memory:
      return "NO_MEMORY";
    case ErrorCode::exists:
      return "EXISTS";
    case ErrorCode::corrupt:
      return "CORRUPT";
    case ErrorCode::cancelled:
      return "CANCELLED";
  }
  return "BUG";
}

}  // namespace halfbyte
