/* pages.h: the operating system's pages. */
#ifndef KVC_PAGES_H
#define KVC_PAGES_H

#include <stddef.h>

enum { KVC_HUGE_PAGE = 2 << 20 };

/* Whether there are such functions for this system; else nothing is mapped, and nothing given back. */
#if defined(_WIN32)
enum { KVC_HAS_PAGES = 0 };
#else
enum { KVC_HAS_PAGES = 1 };
#endif

size_t kvc_os_page_size(void);

/* Memory that is taken as it is touched, from the beginning of a huge page on where one fits in; NULL: there is none.
 */
void *kvc_pages_map(size_t size);
void kvc_pages_unmap(void *p, size_t size);

/* Gives whole pages back; they stay addressable and lose their contents. */
void kvc_pages_drop(void *p, size_t size);

/* Makes whole huge pages of what is written already, where the system can.  Unlike advice given beforehand, this takes
 * no memory for what is not.  Whether it did. */
int kvc_pages_join(void *p, size_t size);

/* Takes the memory of all pages in which [p, p + size) lies, whose contents stay; whether the system has that. */
int kvc_pages_take(void *p, size_t size);

#endif
