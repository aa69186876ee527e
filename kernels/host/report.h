// The message that ends a launch. Its memory is fixed, because the stack of the thread that writes it is abandoned, not unwound.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>

namespace host {

// Which primitive, on which line of the kernel.
struct Site {
  const char* primitive;
  int line;

  bool operator==(const Site& other) const { return primitive == other.primitive && line == other.line; }
};

class Report {
 public:
  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    add(format, arguments);
    va_end(arguments);
  }

  void add(const char* format, va_list arguments) {
    const int written = std::vsnprintf(text_ + length_, sizeof text_ - length_, format, arguments);
    if (written > 0) length_ += static_cast<std::size_t>(written);
    if (length_ > sizeof text_ - 1) length_ = sizeof text_ - 1;
  }

  void clear() { text_[length_ = 0] = '\0'; }
  bool empty() const { return length_ == 0; }
  const char* text() const { return text_; }

 private:
  char text_[1024] = {};
  std::size_t length_ = 0;
};

}  // namespace host
