#pragma once

namespace dataparallel::checkpoint {

/// The opcodes of Python's pickletools that protocol 2 needs.
enum Code : char {
  kAppend = 'a',
  kAppends = 'e',
  kBinFloat = 'G',
  kBinGet = 'h',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kBinPersistentId = 'Q',
  kBinPut = 'q',
  kBinUnicode = 'X',
  kBuild = 'b',
  kEmptyDict = '}',
  kEmptyList = ']',
  kEmptyTuple = ')',
  kGlobal = 'c',
  kLong1 = '\x8a',
  kLong4 = '\x8b',
  kLongBinGet = 'j',
  kLongBinPut = 'r',
  kMark = '(',
  kNewFalse = '\x89',
  kNewObject = '\x81',
  kNewTrue = '\x88',
  kNone = 'N',
  kPop = '0',
  kPopMark = '1',
  kProtocol = '\x80',
  kReduce = 'R',
  kSetItem = 's',
  kSetItems = 'u',
  kStop = '.',
  kTuple = 't',
  kTuple1 = '\x85',
};

}  // namespace dataparallel::checkpoint
