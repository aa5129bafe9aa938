/* What libhalfbyte exports: everything else in it is hidden. C and C++. */
#ifndef HALFBYTE_EXPORT_H
#define HALFBYTE_EXPORT_H

#define HALFBYTE_API __attribute__((visibility("default")))

#endif
