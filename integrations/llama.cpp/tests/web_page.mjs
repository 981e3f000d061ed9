// Opens llama-server's page in Chromium, sends two messages, and prints what the page shows in the end.
// node web_page.mjs URL FOLDER, where FOLDER is llama.cpp's tools/ui after npm ci
import { createRequire } from 'node:module';

const [url, folder] = process.argv.slice(2);
const { chromium } = createRequire(`${folder}/`)('@playwright/test');
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ['--no-sandbox'] });
const page = await browser.newPage();
const shows = (text) => page.getByText(text, { exact: true });

await page.goto(url);
for (const [i, message] of ['Who goes there?', 'And who are you?'].entries()) {
  await page.locator('textarea').first().fill(message);
  await page.keyboard.press('Enter');
  await shows('60 tokens').nth(i).waitFor({ timeout: 60000 }); // the length of an answer, below it
}
console.log(await page.locator('body').innerText());
await browser.close();
