#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace test {

/// Collects torch's warnings of this thread while it lives.
class Warnings : private c10::WarningHandler {
 public:
  Warnings() : guard_(this) {}

  std::vector<std::string> texts;

 private:
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace test
