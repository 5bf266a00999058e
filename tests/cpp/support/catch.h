#pragma once

// Catch2, version 2 or 3, whichever the machine has.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>

#include <string>
using Catch::Approx;
namespace Catch {
inline auto Contains(const std::string& text) {
  return Matchers::ContainsSubstring(text);
}
using Matchers::EndsWith;
using Matchers::StartsWith;
}  // namespace Catch
namespace test {
using ListenerBase = Catch::EventListenerBase;
inline std::string name_of(const Catch::TestCaseStats& stats) {
  return stats.testInfo->name;
}
}  // namespace test
#else
#include <catch2/catch.hpp>
#ifdef CATCH_CONFIG_EXTERNAL_INTERFACES
namespace test {
using ListenerBase = Catch::TestEventListenerBase;
inline std::string name_of(const Catch::TestCaseStats& stats) {
  return stats.testInfo.name;
}
}  // namespace test
#endif
#endif
